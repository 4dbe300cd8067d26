"""Container images of programs and the libraries that they are linked to, as archives for `ctr images import`."""

import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import tarfile

from daemons import run

FOLDERS = {"dev": 0o755, "etc": 0o755, "proc": 0o755, "sys": 0o755, "tmp": 0o1777, "var/run": 0o755}
USER = "65532:65532"


def files_of(programs):
    """Path in the image -> path here."""
    files = {}
    for program in programs:
        path = shutil.which(str(program))
        files[f"usr/bin/{os.path.basename(path)}"] = path
        for library in re.findall(r"(/\S+) \(", run("ldd", path)):
            files[library.lstrip("/")] = os.path.realpath(library)
    return files


def layer_of(programs):
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for name, mode in FOLDERS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for name, path in sorted(files_of(programs).items()):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o755, os.path.getsize(path)
            with open(path, "rb") as file:
                archive.addfile(entry, file)
    return layer.getvalue()


def write_image(archive_path, name, entrypoint, programs, environment=()):
    """Programs are paths, or names in PATH."""
    layer = layer_of(programs)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"User": USER, "Entrypoint": entrypoint, "Env": ["PATH=/usr/bin", *environment]},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
    }
    config = json.dumps(config).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive_path, "w") as archive:
        for entry_name, content in ((config_name, config), ("layer.tar", layer), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(entry_name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def dockerfile_environment():
    """What the project's own image sets."""
    text = (pathlib.Path(__file__).parents[2] / "Dockerfile").read_text()
    return re.findall(r"\bRAPT_\w+_ADDRESS=\S+", text)
