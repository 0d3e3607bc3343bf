"""The steps of a run at a URL: put there behind training's back, fetched at a start."""
