"""`autotune report`: runs as one self-contained page, drawn from their journals.

    runs      a journal read into plain series           acts      decisions with evidence and verdict
    groups    seeds of one recipe: mean and band         thin      long series, no peak lost
    scales    axes and ticks                             panels    one chart as SVG and HTML
    heat      the ratio histogram as a picture           charts    the charts of a group (look, timelines)
    verdict   did it help, in words                      tables    runs, rules, decisions
    page      all of it together (page.css, page.js)     pictures  PNG files, by a browser
    command   what the command does

`render(runs) -> str` is the page; nothing in it is fetched from anywhere.
"""

from autotune.report.page import render
from autotune.report.runs import RunData, read_run

__all__ = ["RunData", "read_run", "render"]
