"""The browser of the reports' tests, and the rule for tests marked `browser` where there is none."""

from tests.reporting.conftest import browser, pytest_runtest_setup


__all__ = ["browser", "pytest_runtest_setup"]
