"""What is installed: every module, and the mark of types."""

import configparser
import pathlib

import keras_fastclip

ROOT = pathlib.Path(__file__).parents[1]


def test_all_packages_are_listed_with_their_folders():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    packages = config["options"]["packages"].split()
    folders = dict(
        line.split(" = ")
        for line in config["options"]["package_dir"].strip().splitlines()
    )
    assert set(packages) == set(folders)
    listed = {ROOT / folder for folder in folders.values()}
    for folder in ("keras_fastclip", "registry"):
        for module in (ROOT / folder).rglob("*.py"):
            assert module.parent in listed, module


def test_types_are_shipped_and_versions_agree():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    shipped = config["options.package_data"]["keras_fastclip"].split()
    assert "py.typed" in shipped
    assert (ROOT / "keras_fastclip" / "py.typed").is_file()
    assert config["metadata"]["version"] == keras_fastclip.__version__
