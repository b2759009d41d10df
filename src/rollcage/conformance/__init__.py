"""What every backend of boxes and every agent must hold: two suites that users run on their own, too."""
