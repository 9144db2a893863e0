"""A share of a suite's cases, for suites that are too long for one process.

    pytest -p degarble.harness.plugins.shares --share 2/6 FILE

Of six shares the second one has every sixth case by name, from the second on. A share without a
case ends as a file without one: with status 5.
"""

from __future__ import annotations

import re

import pytest


def read_share(text: str) -> tuple[int, int]:
    """Return the number of a share, from 1 on, and of how many shares it is one."""
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise pytest.UsageError(
            f"--share: {text!r} is no share; expected I/N with I from 1 to N, such as --share 2/6"
        )
    return int(found[1]), int(found[2])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--share", default="1/1", metavar="I/N", help="run every Nth case from the Ith on"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what is no share before anything is collected."""
    read_share(config.getoption("--share"))


@pytest.hookimpl(trylast=True)  # shares are of what -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases of the share."""
    number, shares = read_share(config.getoption("--share"))
    # By name: processes may collect in orders of their own.
    chosen = set(sorted(item.nodeid for item in items)[number - 1 :: shares])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
