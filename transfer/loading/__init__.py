"""From checkpoint names to slots of parameter shells: names, outcomes, loaders that cut and write, and the walker."""

__all__: list[str] = []
