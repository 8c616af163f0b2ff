"""Release: wheel, sdist, formula, each tried as a user installs it."""
