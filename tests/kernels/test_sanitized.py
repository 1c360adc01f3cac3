"""The cases that compute-sanitizer checks on a GPU hold under Triton's interpreter."""

from tests.gpu.sanitized import check_rows


def test_cases_hold() -> None:
    check_rows("cpu")
