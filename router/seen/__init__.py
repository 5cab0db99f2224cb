"""What is seen of requests: records, metrics, the page, and `kvferry explain`."""

from __future__ import annotations
