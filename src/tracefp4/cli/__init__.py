"""The command line: recipes, flags and exit codes. No logic worth testing elsewhere lives here."""
