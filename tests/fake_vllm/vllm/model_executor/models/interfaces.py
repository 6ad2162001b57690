"""Names that eplb asks for."""


class MixtureOfExperts:
    """What can run under EPLB."""


class SupportsMultiModal:
    """What may hold a language model."""
