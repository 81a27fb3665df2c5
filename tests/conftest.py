"""Hypothesis profiles: `make test` tries 15 cases a property, `make test-long` a thousand."""

from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", deadline=None, max_examples=15, suppress_health_check=_QUIET)
settings.register_profile("long", deadline=None, max_examples=1000, suppress_health_check=_QUIET)
settings.load_profile("default")
