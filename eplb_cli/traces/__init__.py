"""One module a recorder; each yields windows of ExpertLoads."""
