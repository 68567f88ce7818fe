"""What holds for the tests of gradbus.torch: an older torch cannot load the files, so none of them is collected."""

from backend_support import HAS_TORCH_BACKEND

collect_ignore_glob = [] if HAS_TORCH_BACKEND else ["test_*.py"]
