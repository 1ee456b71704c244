"""A plugin of pytest: what the tests of DeepSpeed import is there when their ranks are forked.

Each of those tests starts its ranks anew, and each rank imports DeepSpeed, which takes seconds.
"""

import multiprocessing

multiprocessing.set_forkserver_preload(["deepspeed", "transformers"])
