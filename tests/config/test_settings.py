from __future__ import annotations

import os

import pytest

from workbench.config.lane import parse_toml
from workbench.config.settings import Settings, keep_engine, keep_theme, parse_settings, read_settings
from workbench.config.theme import load_themes, parse_theme
from workbench.errors import ConfigurationError


def test_no_file_is_the_defaults(tmp_path):
    assert read_settings(tmp_path / "settings.toml") == Settings()


def test_theme_and_keys_are_read(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('theme = "paper"\n[keys]\nzoom = "Z"\nflip-next = "],n"\n')
    settings = read_settings(path)
    assert (settings.theme, dict(settings.keys), settings.problems) == ("paper", {"zoom": "Z", "flip-next": "],n"}, ())


def test_wrong_fields_are_named_and_the_rest_is_kept():
    settings = parse_settings('theme = 3\nfont = "x"\n[keys]\nzoom = ["z"]\nhelp = "f1"\n')
    assert settings.theme == "harbour"
    assert dict(settings.keys) == {"help": "f1"}
    said = " ".join(map(str, settings.problems))
    assert all(word in said for word in ("theme must be", "unknown setting 'font'", "[keys] zoom must be"))


def test_damaged_files_are_a_problem_and_the_defaults(tmp_path):
    path = tmp_path / "settings.toml"
    for data, word in ((b"theme = ", "not TOML"), (b"\xff\xfe", "not UTF-8"), (b"#" * 100_000, "larger than")):
        path.write_bytes(data)
        settings = read_settings(path)
        assert settings.theme == "harbour"
        assert word in str(settings.problems[0])
    assert "cannot be read" in str(read_settings(tmp_path).problems[0])


@pytest.mark.parametrize("text", ["a = " + "[" * 3000, "a = " + "1" * 5000])
def test_toml_beyond_python_s_limits_is_a_problem_too(text):
    assert "not TOML" in str(parse_settings(text).problems[0])
    with pytest.raises(ConfigurationError, match="not TOML"):
        parse_theme(text)
    with pytest.raises(ConfigurationError, match="not TOML"):
        parse_toml(text)


def test_a_pipe_in_the_place_of_a_file_is_a_problem_and_nothing_waits(tmp_path):
    os.mkfifo(tmp_path / "settings.toml")
    assert "cannot be read" in str(read_settings(tmp_path / "settings.toml").problems[0])
    assert "cannot be read" in str(load_themes([tmp_path])[1][0])


def test_keys_that_are_no_table_are_a_problem():
    assert "must be a table" in str(parse_settings('keys = "z"').problems[0])


@pytest.mark.parametrize(
    "before",
    ["", 'theme = "harbour"\n', '# mine\n[keys]\nzoom = "Z"\n', 'theme = "a" # why\n\n[keys]\ntheme = "T"\n'],
)
def test_a_kept_theme_changes_nothing_else_in_the_file(tmp_path, before):
    path = tmp_path / "folder" / "settings.toml"
    if before:
        path.parent.mkdir()
        path.write_text(before)
    old = read_settings(path)
    keep_theme(path, "paper")
    new = read_settings(path)
    assert new.theme == "paper"
    assert new.keys == old.keys
    assert ("# mine" in before) == ("# mine" in path.read_text())


def test_interpreters_are_read_and_what_is_none_is_named():
    settings = parse_settings('[engines]\nvllm = " ~/v/bin/python "\nllamacpp = 3\nnonesuch = "x"\nserver = ""\n')
    assert dict(settings.engines) == {"vllm": "~/v/bin/python"}
    said = " ".join(map(str, settings.problems))
    assert all(
        word in said for word in ("[engines] llamacpp must be", "no engine 'nonesuch'", "[engines] server must be")
    )
    assert "[engines] must be a table" in str(parse_settings("engines = 3").problems[0])


FILES = [
    "",
    "theme = 'paper'",
    '[keys]\nzoom = "Z"\n',
    '# mine\n[engines]  # pythons\nllamacpp = "/a" # old\n\n[keys]\nvllm = "v"\n',
    '[keys]\nzoom = "Z"\n[ engines ]\nvllm = "/old"\nllamacpp = "/a"\n',
    '[engines]\n"vllm" = "/old"',
    "[engines]",
    '[keys]\r\nzoom = "Z"\r\n[engines]\r\nllamacpp = "/a"\r\n',
]


@pytest.mark.parametrize("before", FILES)
@pytest.mark.parametrize("python", ["/new/bin/python", 'C:\\odd "name" [engines] \\1 ünï', "/old"])
def test_an_interpreter_is_written_and_taken_out_and_every_other_byte_stays(tmp_path, before, python):
    path = tmp_path / "settings.toml"
    path.write_bytes(before.encode())
    old = read_settings(path)
    keep_engine(path, "vllm", python)
    new = read_settings(path)
    assert dict(new.engines) == {**old.engines, "vllm": python}
    assert (new.keys, new.theme, new.problems) == (old.keys, old.theme, ())
    kept = [
        line for line in before.encode().splitlines(keepends=True) if not line.lstrip().strip(b'"').startswith(b"vllm")
    ]
    assert all(line.strip() in path.read_bytes() for line in kept)
    keep_engine(path, "vllm", None)
    assert dict(read_settings(path).engines) == {name: value for name, value in old.engines.items() if name != "vllm"}
    assert all(line in path.read_bytes() for line in kept if line.endswith(b"\n"))
    once = path.read_bytes()
    keep_engine(path, "vllm", None)
    assert path.read_bytes() == once


@pytest.mark.parametrize(
    "before", ['engines = {vllm = "/old"}\n', 'engines.vllm = "/old"\n', "engines = 3\n", "x = [\n"]
)
def test_what_cannot_be_changed_by_a_line_is_left_alone_and_the_line_is_told(tmp_path, before):
    path = tmp_path / "settings.toml"
    path.write_text(before)
    with pytest.raises(ConfigurationError, match=r"under \[engines\]: vllm = \"/new\""):
        keep_engine(path, "vllm", "/new")
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["settings.toml"]


def test_no_file_is_made_to_take_something_out_and_one_that_is_a_link_stays_a_link(tmp_path):
    path = tmp_path / "settings.toml"
    real = tmp_path / "dotfiles" / "workbench.toml"
    real.parent.mkdir()
    real.write_text("")
    real.chmod(0o600)
    path.symlink_to(real)
    keep_engine(path, "vllm", "/p")
    assert path.is_symlink()
    assert 'vllm = "/p"' in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o600


def test_a_theme_is_not_kept_in_a_file_that_is_damaged(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("theme = ")
    with pytest.raises(ConfigurationError, match="cannot be changed"):
        keep_theme(path, "paper")
    assert path.read_text() == "theme = "
