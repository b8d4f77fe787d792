"""docs/commands.md and the committed pictures show what the commands give today."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse.tools.commands.main import main

_DOCS = Path(__file__).parents[3] / "docs"
_PAGE = (_DOCS / "commands.md").read_text(encoding="utf-8")
_OF_DATA = "pp=2,dp=4,tp=4 --node-size 8 --rank 13"
_PICTURES = {
    "sharing.svg": "world=16 --view pp=2,batch=4,cp=1,tp=2,loss=batch*cp "
    "--view pp=2,dp_replicate=1,fsdp=4,tp=2 --view pp=2,dp_replicate=1,efsdp=2,ep=4 "
    "--view pp=2,dp_replicate=1,dp_shard=4,cp=1,tp=2 --node-size 8 --rank 5",
    "plan.svg": "pp=8,dp=160,tp=8 --view pp=8,replicate=4,shard=40,tp=8 --node-size 8 --rank 777",
}


def test_the_command_prints_what_the_page_shows(capsys) -> None:
    page = _PAGE.replace("\\\n", "")
    shown = re.search(r"```console\n\$ meshverse (plan.+)\n([\s\S]+?)```", page)
    assert shown is not None
    assert main(shlex.split(shown[1])) == 0
    assert capsys.readouterr().out == shown[2]


def test_the_data_is_what_the_page_shows(capsys) -> None:
    shown = re.search(r"```json\n([\s\S]+?)```", _PAGE)
    assert shown is not None
    assert main(["plan", *_OF_DATA.split(), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    del data["groups"][1:], data["mine"]["groups"][1:]
    assert json.loads(shown[1]) == data


def test_the_text_is_what_the_page_shows() -> None:
    shown = re.search(r"```text\n(Each place [\s\S]+?)```", _PAGE)
    assert shown is not None
    with fake_world(32, 13):
        mesh = init_device_mesh("cpu", (2, 4, 4), mesh_dim_names=("pp", "dp", "tp"))
        assert f"{mesh.draw('dp', node_size=8)}\n" == shown[1]


@pytest.mark.parametrize("name", _PICTURES)
def test_the_committed_picture_is_what_is_drawn(name: str, tmp_path: Path, capsys) -> None:
    drawn = tmp_path / name
    assert main(["plan", *shlex.split(_PICTURES[name]), "--svg", str(drawn)]) == 0
    capsys.readouterr()
    again = f"draw it again: meshverse plan {_PICTURES[name]} --svg docs/{name}"
    assert drawn.read_text(encoding="utf-8") == (_DOCS / name).read_text(encoding="utf-8"), again
