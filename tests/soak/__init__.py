"""A soak: many clients with a secret each, who come and go while a manager loads and unloads, watched for any mistake.

``nox -s soak -- --minutes 10 --seed 7`` runs it against the real daemon with the real model. ``plan`` says what is
asked, and everything random in it comes from the seed; ``answers`` reads what came; ``checks`` decides what is a
violation; ``tally`` counts. These four are plain functions. ``wire``, ``clients`` and ``run`` carry it out.
"""
