"""Results of papers, asked again: settings as values, a runner, and tables of claimed beside measured."""
