"""The kvyard command; every subcommand imports late."""
