"""The model store: catalogue, download, lookup and inspection."""
