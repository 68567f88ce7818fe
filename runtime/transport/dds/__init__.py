"""DDS behind one door: the native library, domains, participants, discovery."""
