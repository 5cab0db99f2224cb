"""A connector for vLLM that is slow once, at a place that a test names."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kvferry.connector.vllm.adapter import KvferryConnector

#: A variable with the folder in which a test makes a file for each place that is to be slow; the place
#: removes it.
FOLDER_VARIABLE = "KVFERRY_TEST_SLOW_PLACES"
#: How much longer it takes, in seconds.
SLOW_S = 2.0


class SlowConnector(KvferryConnector):
    """Sleeps in vLLM's calls: for `queue`, `step` and, in the next step after a load, `first_step`; for
    `load` after it.
    """

    _has_loaded = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        _sleep_if_told("queue")
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def wait_for_save(self) -> None:
        # vLLM calls it in each step, also while all requests wait for their loads.
        _sleep_if_told("step")
        if self._has_loaded:
            _sleep_if_told("first_step")
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        self._note(results.finished_recving)
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, received = super().get_finished(finished_req_ids)
        self._note(received)
        return sent, received

    def _note(self, received: set[str] | None) -> None:
        self._has_loaded = bool(received)
        if received:
            _sleep_if_told("load")


def _sleep_if_told(place: str) -> None:
    try:
        (Path(os.environ[FOLDER_VARIABLE]) / place).unlink()
    except FileNotFoundError:
        return
    time.sleep(SLOW_S)
