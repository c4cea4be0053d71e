"""flags: argparse that takes no half words, and says which flag may be meant."""
import argparse
import difflib
import re

Whole = argparse.RawDescriptionHelpFormatter


class Parser(argparse.ArgumentParser):
    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        super().error(f"unknown flag {unknown[1]}: did you mean {near[0]}?" if near else message)
