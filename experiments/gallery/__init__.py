"""The figures of the project, and the runs they are drawn from: ``make figures``, docs/figures.md.

plan       which runs there are, and which figures they are for
store      a folder for each finished run, found again by a hash of its settings and of the code
federated_runs, parallel_runs    real processes over DDS
tables     what the runs left, as CSV files: all that is drawn comes from these
federated_figures, parallel_figures, tradeoff_figure    the drawing
published  figures of others, as marks for comparison
index      a page that names the data and the command of each figure
"""
