"""What runs inside the sandbox: in a bare Python, which imports these modules from texts (``text_modules.py``).

The way of a row, from its tests to its reward::

    rewards/code_tests.py     finds the program in the response, reads the row's tests, and makes a job of both
    sandbox/server.py         hands the job to a server; there is one for jobs with tests in Python, and one for others
    main.py                   the server: forks a reaper for each job; nothing of a job runs in it
    reaper.py                 process 1 of a namespace: compiles the program, starts a process per case or run of cases
    processes.py, limits.py   one such process: forked, limited, watched until it ends or breaks a limit

      a case is            its process                                        its verdict
      standard input       program.py runs the program as Python does         rewards/outputs.py compares outputs
      a call with values   program.py loads the program and calls it          rewards/outputs.py compares values
      tests in Python      python_tests.py: one of the two ways below         that of pytest, or of the text itself

Neither outputs nor values that are expected come here, so no program learns them. Tests in Python are the exception:
their text must run beside the program. ``static_check/`` decides how:

- *In one process*, as people run tests, where the text of the program shows all that it does, and nothing of it could
  change or learn what the tests expect (``check.py``; ``allowlist.py`` has what is allowed). Then every class in the
  interpreter is made unchangeable, attributes that the text leaves open are checked as they are used, and the program
  is executed (``same_process/``). One that is caught then is run again in the other way.
- *In a separate process*, otherwise. The text of the tests is in no memory of the program's process. The two talk by
  lines of JSON: values cross as copies; of other objects the tests have proxies, which ask for attributes and calls;
  what ``==`` and arithmetic of such objects may decide is limited (``separate_process/``).

In both, ``testing/runner.py`` executes a text of tests with its own names (``names.py``) and with checks around its
``with`` statements (``text_of_tests.py``), and runs what pytest collects in it (``pytest_session.py``). Each result is
a line on a pipe that begins with a number which the program cannot know; ``testing/reports.py`` believes the lines of a
case only if they are complete.

``prelude.py`` has the names that programs use without an import; ``single_program.py`` is all of this in one process,
for an HTTP service.
"""
