"""One-line mistakes, put in on purpose: does a test notice?  `make mutants`, docs/testing.md."""
