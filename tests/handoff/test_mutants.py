"""The changes that `make mutants` makes are the ones that it says."""

from __future__ import annotations

from collections import Counter

from tests.support.mutants import SUITES, Measured, Mutant, chosen, places_in

SOURCE = b'''\
"""Text."""
def act(self, actions):
    """More text."""
    if self.is_open and not self.is_late:
        self.sent = 1
        self.end()
    logger.info("no message")
    actions += [Send(1), *self.more(), rest]
    assert self.sent
    return [each for each in actions if each]
'''


def changed(kind: str) -> set[str]:
    """Each mutant's first line that differs from the source."""
    lines = SOURCE.decode().splitlines()
    mutants = [each for each in places_in("p/f.py", SOURCE) if each.kind == kind]
    texts = [each.apply(SOURCE).decode().splitlines() for each in mutants]
    return {next(new.strip() for old, new in zip(lines, text, strict=True) if old != new) for text in texts}


def test_a_condition_is_dropped() -> None:
    assert changed("condition") == {
        "if True:",
        "if False:",
        "if (self.is_open):",
        "if (not self.is_late):",
        "return [each for each in actions if True]",
    }


def test_a_bound_moves() -> None:
    lines = {
        "MAX: Final = 8": "MAX: Final = 2 * 8",
        "_FIRST_S = 0.5": "_FIRST_S = 2 * 0.5",
        "failed |= not loaded": "failed = not loaded",
        "names.popitem(last=False)": "names.popitem(last=True)",
        "found = size >= MAX": "found = size > MAX",
        "found = name not in names": "found = name in names",
    }
    for line, changed_line in lines.items():
        source = line.encode()
        bounds = [each for each in places_in("p/f.py", source) if each.kind == "bound"]
        assert [each.apply(source).decode() for each in bounds] == [changed_line]


def test_a_message_is_dropped() -> None:
    assert changed("message") == {
        "pass",  # instead of `self.end()`, and of the whole list
        "actions += [*self.more(), rest]",
        "actions += [Send(1), rest]",
    }


def test_two_statements_are_swapped() -> None:
    # Neither the text, nor what is only for the log and a statement after it, is left out: order may matter
    # to both.
    assert changed("swap") == {"self.end()", "actions += [Send(1), *self.more(), rest]"}


def test_a_seed_gives_the_same_mutants_of_each_folder() -> None:
    mutants = chosen(24, seed=3)
    assert mutants == chosen(24, seed=3)
    assert mutants != chosen(24, seed=4)
    assert Counter(each.folder for each in mutants) == dict.fromkeys(SUITES, 6)
    assert Counter(each.kind for each in mutants) == {"condition": 8, "bound": 8, "swap": 4, "message": 4}
    assert all(isinstance(each, Mutant) and each.new != "" for each in mutants)


def test_a_suite_that_does_not_come_to_a_change_cannot_notice_it() -> None:
    # `pass` instead of `self.end()`, line 6
    message = next(each for each in places_in("p/f.py", SOURCE) if each.new == "pass")
    assert Measured(1.0, {"p/f.py": [2, 4, 5, 6]}).comes_to(message, SOURCE)
    assert not Measured(1.0, {"p/f.py": [2, 4, 7], "p/g.py": [6]}).comes_to(message, SOURCE)


def test_a_part_of_an_expression_counts_as_its_statement() -> None:
    source = b"if (\n    one\n    and two\n):\n    act()\n"
    dropped = next(each for each in places_in("p/f.py", source) if each.new == "(two)")
    assert Measured(1.0, {"p/f.py": [1]}).comes_to(dropped, source)
    assert not Measured(1.0, {"p/f.py": [5]}).comes_to(dropped, source)


def test_a_decorator_is_no_part_of_its_statement() -> None:
    source = b"@dataclass(frozen=True)\nclass Empty: ...\n"
    [turned] = places_in("p/f.py", source)
    assert Measured(1.0, {"p/f.py": [1, 2]}).comes_to(turned, source)
