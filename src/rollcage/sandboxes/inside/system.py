"""What of a machine's own system a box shows, and the files in `/etc` that every box has instead of the machine's."""

from __future__ import annotations

FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Of the machine, below `/`."""
ETC = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "pki",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
"""Of the machine, below `/etc`: nothing else there is shown."""
_HOST_FILES = ("cmdline", "kallsyms", "kcore", "keys", "kmsg", "modules", "partitions", "sched_debug", "timer_list")
HOST_FILES = tuple(f"/proc/{name}" for name in _HOST_FILES)
"""What the kernel tells of the machine itself: empty in boxes. Few, as hiding one takes a mount for each command."""
USERS = {
    "passwd": "root:x:0:0:root:/:/usr/sbin/nologin\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    "group": "root:x:0:\nuser:x:1000:\n",
}
"""Files of every box, by their name in `/etc`."""
ROOT_USERS = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    "group": USERS["group"],
}
"""The same, for boxes whose commands see themselves as root."""
APT = ("apt/apt.conf.d/99one-user", 'APT::Sandbox::User "root";\n')
"""A file of those in `/etc`: apt would fetch as a user of its own, and such a box has one."""
NAMES = {"hosts": "127.0.0.1 localhost box\n::1 localhost\n", "hostname": "box\n"}
"""The same, for boxes whose network we make ourselves; container engines write their own."""
