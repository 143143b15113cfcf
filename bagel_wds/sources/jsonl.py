"""Rows of JSON lines: cut up by byte offset, so that a slice is read without what lies before it."""

from __future__ import annotations

import json
import random
import re
from itertools import batched, groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple
