"""What a run says of itself: its diary, and what `status` and `report` read out of it."""
