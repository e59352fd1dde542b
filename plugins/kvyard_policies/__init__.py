"""The built-in policies, found through entry points exactly as third-party ones are."""
