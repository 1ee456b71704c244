"""From a schedule to one rank's plan, for peer memory or for messages.

`table` lists the folds of a schedule, `compile` derives every SIGNAL and WAIT, `stage` redirects
arrays that peers cannot map, `messages` matches sends and receives, `plan` is the
result. Uses `language`. Read `compile` first.
"""
