"""Installs Debian's chromium, which tests of the console's page need: as root, and if it is absent.

`python tests/router/http/get_chromium.py`. Playwright's own browsers are not downloaded.
"""

import os
import shutil
import subprocess
import sys


def main() -> int:
    if shutil.which("chromium") is None:
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            print("error: no chromium; as root: apt-get install chromium")
            return 1
        install = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", "chromium"]
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(install, env=quiet, stdout=subprocess.DEVNULL).returncode:
            subprocess.run(
                ["apt-get", "-qq", "update"], check=True
            )  # it knew no packages, or old ones
            subprocess.run(install, env=quiet, stdout=subprocess.DEVNULL, check=True)
    print(shutil.which("chromium"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
