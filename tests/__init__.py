"""A package, so that tests import the rigs they share as `tests.support`."""
