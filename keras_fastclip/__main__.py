"""`python -m keras_fastclip`: what a bug report should say of the machine."""

import textwrap

from keras_fastclip.environment import environment
from keras_fastclip.registry import default_registry


def main() -> None:
    """Prints versions, devices, settings and the layers that have a rule."""
    facts = environment()
    registry = default_registry()
    own = [cls.__name__ for cls in registry.classes()]
    named = [name.rpartition(".")[2] for name in registry.names()]
    facts["layers with a rule"] = ", ".join(sorted(own))
    facts["of other packages"] = ", ".join(sorted(set(named)))
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        print(
            textwrap.fill(
                name.ljust(width) + value,
                width=79,
                subsequent_indent=" " * width,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


if __name__ == "__main__":
    main()
