"""Every mistake of a user ends in one line that says what to do, and in an exit code that tells it from the others."""

import sys
from pathlib import Path

import pytest

from gradbus.commands.launch.script import check_exists
from gradbus.runtime.errors import ConfigError

GLYPHS = ("--set", "task.data=glyphs", "--set", 'task.data_options={"train": 20, "test": 10}', "--log-level", "error")


def one_line(text: str) -> str:
    """The only line of the text."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def test_an_unknown_key_names_the_nearest(invoke, configs) -> None:
    ended = invoke("client", configs / "client.conf.json", "--id", 0, "--set", "task.batchsize=4")
    assert ended.code == 2
    assert "did you mean 'batch_size'" in one_line(ended.err)


def test_a_key_without_its_section_is_named_with_it(invoke, configs) -> None:
    ended = invoke("controller", configs / "controller.conf.json", "--set", "rounds=3")
    assert ended.code == 2
    assert "unknown key 'rounds', did you mean 'federated.rounds'?" in one_line(ended.err)


@pytest.mark.parametrize("given", ["controller", "client", "client.two-machines", "ddp"])
@pytest.mark.parametrize("command", ["controller", "client", "worker"])
def test_a_configuration_of_another_command_is_called_so(invoke, configs, given, command) -> None:
    owner = {"ddp": "worker"}.get(given, given.partition(".")[0])
    path = configs / f"{given}.conf.json"
    options = {"controller": (), "client": ("--id", 0), "worker": ("--rank", 0, "--world", 1)}[command]
    ended = invoke(command, path, *options, "--set", "bus.interface=none0")  # else the right one would start
    assert ended.code == 2
    said = f"This is the configuration of a {owner}: gradbus {owner} {path}"
    assert (said in one_line(ended.err)) == (owner != command)


@pytest.mark.parametrize("command", ["controller", "client", "worker", "aggregator"])
def test_the_configuration_of_a_relay_given_to_a_member_names_the_command_for_it(
    invoke, tmp_path: Path, command: str
) -> None:
    (tmp_path / "relay.toml").write_text('[relay]\nlisten = ["tls/0.0.0.0:8443"]\n')
    options = {"client": ("--id", 0), "worker": ("--rank", 0, "--world", 1)}.get(command, ())
    ended = invoke(command, "relay.toml", *options, "--set", "bus.interface=none0")  # else one would start
    assert ended.code == 2
    assert "This is the configuration of a relay: gradbus relay relay.toml" in one_line(ended.err)


def test_a_missing_configuration_file_is_named(invoke) -> None:
    ended = invoke("controller", "absent.json")
    assert ended.code == 2
    assert "absent.json cannot be read: No such file" in one_line(ended.err)


def test_a_configuration_that_is_not_json_says_where(invoke, tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"bus": {')
    ended = invoke("client", "half.json", "--id", 0)
    assert ended.code == 2
    assert "half.json is not valid JSON" in one_line(ended.err)


@pytest.mark.parametrize("place", [(), ("--rank", 0), ("--world", 2), ("--rank", 2, "--world", 2)])
def test_a_worker_without_a_place_is_told_how_to_give_it(invoke, configs, place, monkeypatch) -> None:
    for name in ("RANK", "WORLD", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    ended = invoke("worker", configs / "ddp.conf.json", *place)
    assert ended.code == 2
    assert "Give --rank and --world, or RANK and WORLD in the environment" in one_line(ended.err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-n", 4, "--", "absent.json"), "absent.json cannot be read: No such file"),
        (
            ("-n", 4, "--", "x.json", "--set", "parallel.optimizer.lr=-1"),
            "parallel.optimizer.lr: input should be greater than 0, got -1",
        ),
        (("-n", 0, "--", "x.json"), "-n must be 1 to 1024, got 0"),
        (("-n", 2, "--", "x.json", "--rank", 1), "--rank is not for 'gradbus run'"),
        (("-n", 2, "--", "x.json", "--set", "bus.interface=nope0"), "'nope0' does not exist here"),
        (("x.json",), "the number of ranks is missing. Use -n N"),
    ],
)
def test_what_all_ranks_of_a_launch_would_say_is_said_once(invoke, arguments, said, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    ended = invoke("run", *arguments)
    assert ended.code == 2
    assert said in one_line(ended.err)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, a package with a module, one that can be run, and one that finds its own modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder.py").mkdir()
    for package, module in (("package", "train"), ("runs", "__main__")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the launcher imports nothing')")
        (tmp_path / package / f"{module}.py").write_text("")
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "__init__.py").write_text("__path__.append('elsewhere')")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.py",), "there is no script 'missing.py', as seen from {folder}. Give its path from there"),
        (("trian.py", "--lr", 1), "there is no script 'trian.py', as seen from {folder}. Did you mean train.py?"),
        (("folder.py",), "folder.py is a folder: name the script in it, as in: gradbus run -n 2 -- folder.py/train.py"),
        (("-m", "missing"), "-m missing: there is no module 'missing', as seen from {folder}. Start the command in"),
        (("-m", "package.trian"), "-m package.trian: package 'package' has no module 'trian', as seen from {folder}"),
        (("-m", "train.inner"), "-m train.inner: package 'train' has no module 'inner'"),
        (("-m", "json.missing"), "-m json.missing: package 'json' has no module 'missing'"),
        (
            ("-m", "package"),
            "-m package: it is a package without __main__.py. Name a module in it, as -m package.train",
        ),
    ],
)
def test_a_script_or_module_that_is_not_there_is_reported_once_before_the_start(
    invoke, scripts: Path, arguments, said
) -> None:
    ended = invoke("run", "-n", 2, "--", *arguments)
    assert ended.code == 2
    assert said.format(folder=scripts) in one_line(ended.err)


@pytest.fixture
def namespaces(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders without __init__.py in a package, in each other, and with the name of an installed package."""
    for module in ("package/scripts/train", "package/scripts/deep/train", "package/runs/__main__", "ns/sub/train"):
        (scripts / module).parent.mkdir(parents=True, exist_ok=True)
        (scripts / f"{module}.py").write_text("")
    (scripts / "numpy").mkdir()
    (scripts / "folder.py" / "__main__.py").write_text("")
    # pytest's own finder asks for full names, and would make each answer "cannot tell".
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if "pytest" not in type(one).__module__])
    return scripts


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "package.scripts.train"],
        ["-m", "package.scripts.deep.train"],
        ["-m", "package.runs"],
        ["-m", "ns.sub.train"],
        ["-m", "numpy.f2py"],
        ["folder.py"],
    ],
)
@pytest.mark.usefixtures("namespaces")
def test_folders_without_init_hide_nothing_and_have_modules(arguments: list[str]) -> None:
    check_exists(arguments)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("package.scripts.trian", "package 'package.scripts' has no module 'trian'"),
        ("ns.sub", "it is a package without __main__.py"),
        ("numpy.missing", "package 'numpy' has no module 'missing'"),
    ],
)
@pytest.mark.usefixtures("namespaces")
def test_a_module_that_is_in_no_folder_of_a_namespace_is_reported(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^-m {name}: {said}"):
        check_exists(["-m", name])


def test_a_finder_that_fails_lets_the_ranks_report(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            raise KeyError(name)

    monkeypatch.setattr(sys, "meta_path", [Broken()])
    check_exists(["-m", "missing"])


def test_a_script_of_which_the_file_system_reports_an_error_is_one_sentence(invoke) -> None:
    ended = invoke("run", "-n", 2, "--", f"{'x' * 300}.py")
    assert ended.code == 2
    assert "cannot be read: File name too long. Check its path" in one_line(ended.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py"],
        ["./train.py", "--lr", "1"],
        ["-m", "train"],
        ["-m", "package.train", "-v"],
        ["-m", "runs"],
        ["-m", "found.anywhere"],
        ["-m", "json.tool"],
        ["-m", "gradbus"],
        ["-m", "gradbus.experiments.examples.torch_elastic"],
    ],
)
def test_a_script_or_module_that_python_finds_is_let_through(scripts: Path, arguments: list[str]) -> None:
    check_exists(arguments)


def test_an_option_that_workers_do_not_have_is_refused_once(invoke, configs) -> None:
    ended = invoke("run", "-n", 4, "--", configs / "ddp.conf.json", "--nonsense")
    assert ended.code == 2
    assert ended.err.count("No such option: --nonsense") == 1


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("parallel.world", "world"),
        ("parallel.world_size", "world"),
        ("task.domain", "bus.domain"),
        ("parallel.elastic.epochs", "parallel.epochs"),
        ("parallel.checkpoint.wait_s", "parallel.elastic.wait_s"),
    ],
)
def test_a_key_in_a_wrong_section_is_answered_with_that_of_the_same_name(invoke, configs, wrong, right) -> None:
    ended = invoke("run", "-n", 2, "--", configs / "ddp.conf.json", "--set", f"{wrong}=2")
    assert ended.code == 2
    assert f"unknown key {wrong!r}, did you mean {right!r}" in one_line(ended.err)


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (
            ("controller", "controller"),
            (),
            "'task.batch_size' is a setting of each client: set it in the configuration of the clients",
        ),
        (
            ("controller", "controller"),
            ("--set", "task.task=mine:task"),
            "'task.batch_size' has no effect with task.task: a task of your own sets it, or takes it as one of "
            "task.task_options",
        ),
        (
            ("worker", "ddp"),
            ("--set", "task.task=mine:task", "--rank", 0, "--world", 1),
            "'task.batch_size' has no effect with task.task",
        ),
    ],
)
def test_a_key_that_has_no_effect_here_is_no_correction(invoke, configs, command, options, said) -> None:
    name, config = command
    key = {"controller": "federated.training.batch_size", "worker": "parallel.batch_size"}[name]
    ended = invoke(name, configs / f"{config}.conf.json", *options, "--set", f"{key}=8")
    assert ended.code == 2
    line = one_line(ended.err)
    assert f"unknown key {key!r}; {said}" in line
    assert "did you mean" not in line


def test_a_batch_size_of_a_worker_is_a_setting_of_its_task(invoke, configs) -> None:
    ended = invoke("worker", configs / "ddp.conf.json", "--rank", 0, "--world", 1, "--set", "parallel.batch_size=8")
    assert ended.code == 2
    assert "unknown key 'parallel.batch_size', did you mean 'task.batch_size'?" in one_line(ended.err)


def test_a_rank_that_does_not_come_is_named(invoke, configs, domain) -> None:
    soon = ("--set", "parallel.timeouts.join_s=0.5", "--set", f"bus.domain={domain}")
    ended = invoke("worker", configs / "ddp.conf.json", "--rank", 0, "--world", 3, *soon, *GLYPHS)
    assert ended.code == 4
    assert "missing [1, 2]" in one_line(ended.err)


@pytest.mark.parametrize("command", [("client", "client.conf.json", "--id", 0), ("controller", "controller.conf.json")])
def test_data_that_are_not_there_are_asked_for(invoke, configs, command, tmp_path: Path) -> None:
    name, config, *rest = command
    missing = (
        "--set",
        "task.data=mnist",
        "--set",
        "task.download=false",
        "--data-root",
        tmp_path,
        "--log-level",
        "error",
    )
    ended = invoke(name, configs / config, *rest, *missing)
    assert ended.code == 3
    assert "put the four MNIST files there" in one_line(ended.err)


def test_a_state_directory_that_cannot_be_made_is_named(invoke, configs, domain, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    where = ("--set", "federated.checkpoint.dir=file/state", "--set", f"bus.domain={domain}")
    ended = invoke("controller", configs / "controller.conf.json", *where, *GLYPHS)
    assert ended.code == 6
    assert "state directory file/state cannot be written: Not a directory" in one_line(ended.err)


def test_a_run_directory_that_cannot_be_made_is_named(invoke, configs, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = invoke("controller", configs / "controller.conf.json", "--run-dir", "file/run")
    assert ended.code == 2
    assert "run directory file/run cannot be written" in one_line(ended.err)


def test_a_document_for_cyclone_that_is_not_closed_is_refused(invoke, configs, monkeypatch) -> None:
    monkeypatch.setenv("CYCLONEDDS_URI", "<CycloneDDS><Domain>")
    ended = invoke("client", configs / "client.conf.json", "--id", 0)
    assert ended.code == 2
    assert "CYCLONEDDS_URI is not well-formed XML" in one_line(ended.err)


def test_faults_in_another_form_are_answered_with_the_right_one(invoke, configs) -> None:
    ended = invoke("client", configs / "client.conf.json", "--id", 0, "--set", "bus.faults=drop=0.02")
    assert ended.code == 2
    assert "bus.faults: fault 'drop=0.02': " in (line := one_line(ended.err))
    assert "Write 'drop p=0.02'" in line


def test_an_interface_that_does_not_exist_is_named_with_those_that_do(invoke, configs) -> None:
    ended = invoke("controller", configs / "controller.conf.json", "--set", "bus.interface=nope0")
    assert ended.code == 2
    assert "'nope0' does not exist here" in one_line(ended.err)
    assert "lo" in ended.err


def test_clients_that_do_not_come_are_counted_and_named(invoke, configs, domain) -> None:
    soon = ("--set", "federated.clients.start_timeout_s=0.3", "--set", f"bus.domain={domain}")
    ended = invoke("controller", configs / "controller.conf.json", *soon, *GLYPHS)
    assert ended.code == 4
    assert "missing [0, 1]" in one_line(ended.err)


def test_a_controller_that_is_not_there_is_missed(invoke, configs, domain) -> None:
    soon = ("--set", "client.controller_timeout_s=0.3", "--set", f"bus.domain={domain}")
    ended = invoke("client", configs / "client.conf.json", "--id", 0, *soon, *GLYPHS)
    assert ended.code == 4
    assert "controller: 0 of 1 ready" in one_line(ended.err)


def test_a_demo_does_not_write_over_another_run(invoke, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").touch()
    ended = invoke("demo", "--data", "glyphs", "--run-dir", "run")
    assert ended.code == 2
    assert "run directory run is not empty" in one_line(ended.err)


@pytest.mark.parametrize("text", ["dirichlet:x", "{", "dirichlett"])
def test_a_wrong_partition_of_a_demo_is_refused(invoke, text) -> None:
    ended = invoke("demo", "--data", "glyphs", "--partition", text)
    assert ended.code == 2
    assert text.split(":")[0] in one_line(ended.err)


@pytest.mark.parametrize(
    "arguments", [("client", "x.json"), ("demo", "--rounds", 0), ("demo", "--codec", "q9"), ("x",)]
)
def test_wrong_usage_is_explained_without_a_traceback(invoke, arguments) -> None:
    ended = invoke(*arguments)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "Error" in ended.err or "gradbus client: configuration x.json cannot be read" in ended.err


BROKEN = """
import torch

def data():
    return torch.zeros(2, 3) @ torch.zeros(4, 5)
"""


@pytest.mark.parametrize("style", ["console", "json"])
def test_the_last_line_of_an_error_in_ones_own_code_says_what_where_and_what_to_do(
    invoke, configs, domain, tmp_path: Path, style
) -> None:
    name = f"mine_{style}"  # a module is imported once by this process
    (tmp_path / f"{name}.py").write_text(BROKEN)
    mine = ("--set", f"task.data={name}:data", "--set", f"bus.domain={domain}", "--log-style", style)
    ended = invoke("client", configs / "client.conf.json", "--id", 0, *mine, "--log-level", "error")
    assert ended.code == 13
    header, *frames, error, last = ended.err.splitlines()
    assert header == "Traceback (most recent call last):"
    assert [line for line in frames if "File" in line] == [f'  File "{tmp_path}/{name}.py", line 5, in data']
    assert error.startswith("RuntimeError: ")
    assert last == (
        f"gradbus client: {error}, at {name}.py:5 in data. Mend it there and start again; --traceback shows also the "
        f"lines of libraries"
    )
    full = invoke("client", configs / "client.conf.json", "--id", 0, *mine, "--log-level", "error", "--traceback")
    assert full.code == 13
    assert full.err.count("  File ") > 5
    assert full.err.endswith(f"at {name}.py:5 in data. Mend it there and start again\n")


def test_a_training_function_that_does_not_take_what_it_is_called_with_is_refused(invoke, configs, tmp_path) -> None:
    (tmp_path / "mine_train.py").write_text("def train(model):\n    pass\n")
    ended = invoke(
        "client", configs / "client.conf.json", "--id", 0, "--set", "task.train_fn=mine_train:train", *GLYPHS
    )
    assert ended.code == 2
    assert "it is called with (model, samples, epochs=, lr=, seed=, should_stop=), and takes (model)" in ended.err


def test_what_is_no_fault_of_the_users_code_keeps_its_whole_traceback(invoke, configs, monkeypatch) -> None:
    from gradbus.commands import files

    monkeypatch.setattr(files, "load_settings", lambda *_, **__: {}["nothing"])
    ended = invoke("client", configs / "client.conf.json", "--id", 0)
    assert ended.code == 13  # the lambda here is a user's line; without one:
    monkeypatch.setattr(files, "load_settings", None)
    ended = invoke("client", configs / "client.conf.json", "--id", 0)
    assert ended.code == 1
    assert ended.err.splitlines()[0] == "Traceback (most recent call last):"
    assert ended.err.splitlines()[-1].startswith("gradbus client: unexpected error, TypeError: ")
    assert ended.err.endswith("Please report it, with the traceback above\n")


def test_the_version_is_told(invoke) -> None:
    ended = invoke("--version")
    assert ended.code == 0
    assert ended.out.startswith("gradbus ")


def test_slots_of_an_aggregator_for_which_no_machine_has_memory_are_refused(invoke, configs) -> None:
    slots = ("--set", "aggregator.slots=16777216", "--set", "aggregator.block_elems=4194304")
    ended = invoke("aggregator", configs / "aggregator.conf.json", *slots)
    assert ended.code == 2
    assert "aggregator.slots is 16777216" in one_line(ended.err)
    assert "for which this machine has no memory" in one_line(ended.err)
