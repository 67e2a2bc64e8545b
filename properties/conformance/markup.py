"""Small pieces of a page: its opening, escaped text, links, and the sign of each kind of cell."""

from __future__ import annotations

import html
import re
from pathlib import Path

from properties.conformance.runs import Kind

MARKS: dict[Kind, str] = {
    "pass": "✓",
    "known_issue": "!",
    "not_applicable": "n/a",
    "inconclusive": "?",
    "fail": "✗",
    "not_run": "·",
}
"""A sign of each kind, for whoever does not see its colour."""

TITLES: dict[Kind, str] = {
    "pass": "pass",
    "known_issue": "known issue",
    "not_applicable": "not applicable",
    "inconclusive": "inconclusive",
    "fail": "failed",
    "not_run": "not run",
}

_STYLE = Path(__file__).with_name("style.css")
_PROJECT_FILE = re.compile(r"docs(/[A-Za-z0-9_.-]+)+")
_UP = "../../"
"""From the folder of the page to the project."""


def opening(title: str) -> str:
    """A page until behind its heading, with the style in it; its header is still open."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title>"
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style></head><body><header>"
        f"<h1>{text(title)}</h1>"
    )


def text(value: object) -> str:
    """Escaped, for content and for quoted attributes."""
    return html.escape(str(value), quote=True)


def link(reference: str, label: str) -> str:
    """A link to a public page or to a file of the project's documentation; else plain text."""
    if reference.startswith("https://"):
        return f'<a href="{text(reference)}" rel="noreferrer">{text(label)}</a>'
    if _PROJECT_FILE.fullmatch(reference) and ".." not in reference:
        return f'<a href="{_UP}{text(reference)}">{text(label)}</a>'
    return f"{text(label)} ({text(reference)})"


def cases(count: int) -> str:
    """So many cases, in words."""
    return f"{count:,} {'case' if count == 1 else 'cases'}"
