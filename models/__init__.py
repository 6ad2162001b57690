"""Model families as data: one TOML file a family, read by eplb_cli.checkpoint."""
