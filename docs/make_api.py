"""Writes docs/api.md from the docstrings: `python -m docs.make_api`."""

import inspect
import pathlib
import re

import keras_fastclip

HEAD = """# Reference

Every public name, from its docstring. This page is written by `make docs`.

In the examples, `x` and `y` are your data, `model` is a compiled private model,
`history` what its `fit` returned, and `MyLayer` a layer of yours.
"""
# Methods that a private model has beside those of Keras.
METHODS = (
    "privacy_spent",
    "privacy_statement",
    "set_privacy",
    "clipped_gradients",
    "nonfinite_examples",
)
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):$")


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for name in keras_fastclip.__all__:
        value = getattr(keras_fastclip, name)
        parts.append(entry("##", name, value))
        if name == "DPModel":
            parts += [
                entry("###", f"DPModel.{method}", getattr(value, method))
                for method in METHODS
            ]
    return "\n".join(parts).rstrip() + "\n"


def entry(level: str, name: str, value) -> str:
    """One name: its signature and its docstring."""
    call = f"{name}{signature(value)}".replace(repr(print), "print")
    return f"{level} {name}\n\n`{call}`\n\n{body(value)}\n"


def signature(value) -> str:
    """Names and defaults of the arguments; types are in the code."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return ""
    if inspect.isclass(value):
        value = value.__init__
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(value).parameters.values()
        if parameter.name != "self"
    ]
    return str(inspect.Signature(parameters))


def body(value) -> str:
    """A docstring as Markdown: sections in bold, arguments as a list."""
    lines, section = [], None
    for line in inspect.getdoc(value).splitlines():
        if match := SECTION.match(line):
            section = match[1]
            lines += [f"**{section}**", ""]
        elif section in ("Args", "Attributes", "Raises"):
            lines.append(item(line))
        elif section == "Returns":
            lines.append(line.removeprefix("    "))
        else:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def item(line: str) -> str:
    """`    name: text` as a bullet; what follows belongs to it."""
    if match := re.match(r"^    (\S[^:]*):\s?(.*)$", line):
        names = ", ".join(f"`{name}`" for name in match[1].split(", "))
        return f"- {names}: {match[2]}".rstrip()
    return f"  {line.strip()}" if line.strip() else ""


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_name("api.md")
    path.write_text(page(), encoding="utf-8")
