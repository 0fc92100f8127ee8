"""Build the package, install it into clean environments with its declared dependencies only, and use it there.

The wheel is installed alone, as a library; the source distribution with the extra `cli`, as a program. Each must
import, and run the quickstart: an example in Python, and the first commands of the README. Nothing is taken from the
repository but the two files and the example, and torch has the version of constraints.txt.

python tools/release_check.py
"""

import email
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What may be at the top of the source distribution.
TOP = {
    "src",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "pyproject.toml",
    ".gitignore",
}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command with no path of this repository, and return its output; stop with all of it if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(str(word) for word in command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def built(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def check_contents(source: Path, wheel: Path) -> str:
    """Check that both files have the whole package and nothing else, and return the version."""
    package = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "leanbayes").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    inside = {name for name in names if ".dist-info/" not in name}
    if inside != package:
        sys.exit(f"The wheel differs from src: {sorted(inside ^ package)[:10]}")
    with tarfile.open(source) as archive:
        members = [Path(*Path(member.name).parts[1:]) for member in archive.getmembers() if member.isfile()]
    tops = {path.parts[0] for path in members}
    if tops != TOP or {path.relative_to("src").as_posix() for path in members if path.parts[0] == "src"} != package:
        sys.exit(f"The source distribution should hold {sorted(TOP)} and all of src, but it holds {sorted(tops)}")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    if sorted(needed) != sorted(declared):
        sys.exit(f"The wheel needs {needed}, but pyproject.toml declares {declared}")
    return str(about["Version"])


def installed(folder: Path, requirement: str) -> Path:
    """Make an environment with one requirement and what it declares, and return the folder of its programs."""
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", ROOT / "constraints.txt", requirement, cwd=folder)
    return programs


def use(programs: Path, commands: Sequence[Sequence[str | Path]], version: str, folder: Path) -> None:
    """Run commands in an empty folder, and check that the installed package has the version."""
    folder.mkdir()
    script = "import leanbayes; print(leanbayes.__version__, leanbayes.__file__)"
    found, path = run(programs / "python", "-c", script, cwd=folder).split(maxsplit=1)
    if found != version or not Path(path.strip()).is_relative_to(programs.parent):
        sys.exit(f"Version {found} was imported from {path.strip()}, not version {version} of the environment")
    for program, *words in commands:
        print(f"  {program} {' '.join(str(word) for word in words)}", flush=True)
        run(programs / program, *words, cwd=folder)


def main() -> None:
    """Run all checks, and stop at the first that fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dist").mkdir()
        source, wheel = built(folder / "dist")
        version = check_contents(source, wheel)
        sizes = ", ".join(f"{path.name} ({path.stat().st_size / 1e3:,.0f} kB)" for path in (source, wheel))
        print(f"Built {sizes}", flush=True)

        print("The wheel, with torch, numpy and safetensors only:", flush=True)
        library = [("python", ROOT / "examples" / "regression.py")]
        use(installed(folder / "library", str(wheel)), library, version, folder / "in-library")

        print("The source distribution, with the extra cli:", flush=True)
        program = [
            ("leanbayes", "--version"),
            ("leanbayes", "fit", "mean-field", "--epochs", "2", "--out", "run"),
            ("leanbayes", "evaluate", "run"),
            ("leanbayes", "decide", "run", "--false-alarms", "0.05"),
            ("leanbayes", "info", "run"),
            ("leanbayes", "report", "run", "--evaluation.shift-examples", "50", "--out", "report.html"),
        ]
        use(
            installed(folder / "program", f"leanbayes[cli] @ {source.as_uri()}"),
            program,
            version,
            folder / "in-program",
        )
    print(f"leanbayes {version} can be released.")


if __name__ == "__main__":
    main()
