"""The directories of CUDA 13 and cuDNN 9 on this machine, in the syntax of --cudnn_libraries.

Taken from RAPT_CUDNN_LIBRARIES, this Python's packages, or those of `./dev build --cudnn`, in this order;
otherwise empty, for the system's search path. Prints them.
"""

import os
import pathlib
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("nvidia/cudnn/lib", "nvidia/cu13/lib")


def directories():
    if named := os.environ.get("RAPT_CUDNN_LIBRARIES"):
        return named
    for packages in (pathlib.Path(sysconfig.get_path("purelib")), *ROOT.glob("build/cudnn/lib/python3*/site-packages")):
        if all((packages / folder).is_dir() for folder in FOLDERS):
            return ":".join(str(packages / folder) for folder in FOLDERS)
    return ""


if __name__ == "__main__":
    print(directories())
