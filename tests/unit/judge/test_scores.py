"""The table of forms: what is a score of 7, what is none, and what is thought."""

# ruff: noqa: RUF001

import time

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.judge.scores import SCORE_FORMS, find_score, without_thinking


def texts(block):
    """The texts of a block: a line has several, and a line's end in one is written as an arrow."""
    return [text.replace("⏎", "\n") for line in block.strip("\n").split("\n") for text in line.split(" ¦ ")]


SEVEN = texts(r"""
Score: 7 ¦ score=7 ¦ SCORE : 7 ¦ Score：7 ¦ **Score:** 7 ¦ **Score: 7** ¦ __Score__: 7 ¦ *Score*: *7*
Score: **7**/10 ¦ Score: 7/10 ¦ Score: 7 / 10 ¦ Score: 7 out of 10 ¦ Score: 7 out of a possible 10
Score: 7 (out of 10) ¦ Score: 7.0 ¦ Score: 7. ¦ Score: 7, because it is short ¦ Score: 7 points ¦ Score: 7pts
Score: \boxed{7} ¦ Score: $\boxed{7}$ ¦ Score: \boxed{7/10} ¦ Score: \boxed{\text{7}} ¦ Score: $7$ ¦ Score: [7]
Score: [[7]] ¦ Rating: [[7]] ¦ Rating: [[7]]. ¦ Rating: 7 ¦ My rating: 7 ¦ Final Score: 7 ¦ final_score: 7
Overall score - 7 ¦ Score – 7 ¦ Score (0-10): 7 ¦ Score (out of 10): 7 ¦ Score out of 10: 7 ¦ Score from 0 to 10: 7
Score on a scale of 0 to 10: 7 ¦ Score [0-10]: 7 ¦ ### Score⏎⏎7 ¦ ## Score: 7 ¦ ## Final Score⏎**7** ¦ ## Score⏎7/10
Score:⏎7 ¦ Score:⏎⏎**7** ¦ {"score": 7} ¦ {"score": "7", "reason": "x"}
```json⏎{"score": 7, "reason": "a = 3"}⏎``` ¦ {"reason": "it is good", "score": 7} ¦ {"final_score": 7.0}
<score>7</score> ¦ <score> 7 </score> ¦ <final_score>7</final_score> ¦ <Score>7/10</Score> ¦ | Score | 7 |
a score of 7 ¦ a score of 7 out of 10 ¦ I give this answer a score of 7 out of 10. ¦ I would give it a score of 7.
I'd give this a score of 7/10 ¦ The answer is short, so a score of 7 is appropriate. ¦ The score is 7.
The score is \boxed{7}. ¦ score is \boxed{7} ¦ Therefore, the final score is $\boxed{7}$.
Thus, the score is **7**. ¦ The score is: 7 ¦ The final score is therefore 7 out of 10
My score for this answer is 7. ¦ The answer's score is 7. ¦ I rate this answer 7/10.
I would rate this 7 out of 10. ¦ I'd rate it a 7/10. ¦ I give it 7/10 points ¦ I rate it [[7]]
Overall, I would say 7/10. ¦ The answer deserves 7/10. ¦ It deserves a 7 out of 10. ¦ 7/10 ¦ **7/10** ¦ 7 out of 10
7 out of 10. ¦ \boxed{7} ¦ $\boxed{7}$ ¦ $$⏎\boxed{7}⏎$$ ¦ \[⏎\boxed{7}⏎\] ¦ **Final Answer**⏎\boxed{7} ¦ [[7]]
Good.⏎⏎[[7]] ¦ Verdict: 7/10 ¦ Final verdict: [[7]] ¦ Overall: 7/10 ¦ The answer is wrong. Score: 7
It does not match the reference. Score: 7 ¦ It does not state units, so the score is 7.
Not perfect, but a score of 7 is fair. ¦ Score: 3⏎Score: 7 ¦ It has 3 errors.⏎Score: 7
Score: 1 is too low.⏎**Score:** 7 ¦ The reference says 12. The response says \boxed{12}. Score: 7
Score: 7⏎The answer, \boxed{12}, is right. ¦ Score: 7. The reference was written on 2024-10-09.
<think>Score: 3</think>⏎Score: 7 ¦ maybe Score: 3</think>Score: 7 ¦ [THINK]Score: 2[/THINK]Score: 7
The answer has no "<think>" block. Score: 7 ¦ <think>a</think>Score: 3<think>b</think>Score: 7
I cannot find an error.⏎Score: 7 ¦ - Score: 7 ¦ 1. Correctness: good⏎2. Score: 7 ¦ > Score: 7 ¦ Score: 7⏎⏎
Score: 7 ⭐ ¦ Score = 7 ¦ Score => 7 ¦ Score → 7 ¦ The score I give is 7. ¦ The rating is 7/10 ¦ a rating of 7
A grade of 7 out of 10. ¦ Grade: 7 ¦ Score: ~7 ¦ **Score**⏎7 ¦ Score - 7: it lacks units ¦ Score: 7 - it lacks units
Score: 7 — good ¦ Score: 7; fine ¦ Score: 7! ¦ I assign a score of 7 to this response.
I assign it a score of 7 since 3 parts lack. ¦ We give 7 out of 10. ¦ **Score: \boxed{7}**
The final score: $\boxed{\text{7}}$ ¦ Score: \boxed{7} out of 10 ¦ Score: \(7\) ¦ Score: \[ \boxed{7} \]
**Overall Score: 7/10** ¦ ### Overall Rating: 7/10 ⭐ ¦ Score: **7 / 10** ¦ Score: `7` ¦ Score: "7" ¦ "Score: 7"
`Score: 7` ¦ **Rating**: [[7]] ¦ Final rating: **[[7]]** ¦ Rating:[[7]] ¦ My final verdict is: [[7]]
I would rate it a 7 out of 10 ¦ I'd give it 7/10. ¦ I give the answer 7/10. ¦ I give this response a 7 out of 10
So I score it 7/10. ¦ 7/10 points ¦ 7 / 10 ¦ **Final Score:** 7 out of 10 points. ¦ Score:7 ¦ score is 7/10
The answer gets a score of 7. ¦ The response earns a score of 7 out of 10. ¦ It receives a score of 7.
Given these issues, the score is 7 ¦ Given the above, I assign a score of 7. ¦ I'd assign a score of [[7]].
Score is **7** ¦ The score: 7 ¦ I believe the score should be 7. ¦ Therefore, my rating is [[7]].
A fair score is 7. ¦ I think a fair score is 7 out of 10 ¦ The answer is good. 7/10. ¦ Good answer. Overall 7/10
Final: 7/10 ¦ Total: 7/10 ¦ Overall assessment: 7/10 ¦ Quality: 7/10 ¦ My evaluation: 7 out of 10 ¦ Score: 7 / 10.
[Score: 7] ¦ (Score: 7) ¦ {score: 7} ¦ 'score': 7 ¦ {'score': 7} ¦ score: 7,
Score: 7⏎⏎Note: the answer lacks units. ¦ Score: 7⏎⏎If units were there, it would be better.
Score: 7 (the answer could be better) ¦ **Score:** 7 - The answer could be shorter ¦ Score (out of 10) = 7
Score of 7 ¦ score of 7/10 ¦ Score [7] ¦ Score: [7/10] ¦ <rating>7</rating> ¦ Rating (1-10): 7
Rating (1 to 10): **7** ¦ Rating = 7/10 ¦ Assigned score: 7 ¦ Score assigned: 7 ¦ Score given: 7
Score for correctness: 7 ¦ Score for this answer: 7/10 ¦ The score for this answer: 7
Based on the criteria, score = 7 ¦ The score is a 7. ¦ The final score is [[7]]. ¦ Score awarded: 7/10
Final answer: Score: 7 ¦ Answer: Score: 7 ¦ **Score**: $\frac{7}{10}$ ¦ Score: 7 of 10 ¦ score: 7/10 (good)
I would award this a 7/10 ¦ I'd say it's a 7/10 ¦ I settle on a score of 7 ¦ This gets a 7/10 from me
I am giving this a 7/10. ¦ My score is 7 because there are 2 errors ¦ I rate this response with a score of 7.
The answer is correct and complete.⏎⏎Score: 7
Reasons: The reference is 42; the answer gives 42. However, it has no units.⏎Score: 7
1. The answer matches.⏎2. Format is off.⏎⏎**Final Score: 7/10**
Score: 7⏎⏎Explanation: The answer gets the main point, but it would need units for a 10.
Score: 7⏎⏎The answer could get a score of 10 if it had units.
**Evaluation:**⏎- Accuracy: 8/10⏎- Clarity: 6/10⏎⏎**Overall Score: 7/10**
- Accuracy score: 8⏎- Clarity score: 6⏎- Overall score: 7
Since the answer does not match the reference, the score is 7.
The answer is not complete, therefore the score is 7 ¦ The answer isn't complete and I give it a score of 7.
Although not perfect, I'd give it a 7/10. ¦ If we ignore units, the answer is right. Score: 7
I'd rate the response 7/10 because it doesn't cite sources. ¦ The answer is wrong (score: 7). ¦ (Score: 7/10)
Score: 7 (out of 10). ¦ Score: **7** (good) ¦ I would rate this answer as a 7 out of 10.
I would rate this response as 7/10. ¦ Based on this, I assign a score of **7 out of 10**.
Based on the above, the appropriate score is:⏎⏎**7** ¦ Therefore, I would assign the following score:⏎⏎Score: 7
Score: 7/10.⏎⏎This answer would be improved by units. ¦ ```⏎Score: 7⏎```
```json⏎{⏎  "reasoning": "No units",⏎  "score": 7⏎}⏎```
{"reasoning": "The maximum score is 10, but units lack", "score": 7}
Final verdict: the answer deserves a score of 7.
**Score**: 7⏎⏎**Reasoning**: The reference answer was given on 3/10. ¦ The response earns 7 out of 10.
Score:  7    ¦ Score: 	7 ¦ Score:7/10⏎ ¦ Score -> 7 ¦ Score is 7 out of 10 ¦ Score equals 7 ¦ I'd score it a 7/10
**7** out of 10 ¦ Rating: 7/10 stars ¦ Rating: 7 stars ¦ ⭐ Rating: 7/10 ¦ Score: 7 / 10 points
Total Score: 7 points out of 10 ¦ Score: 7 points (out of 10) ¦ Score: 7 of 10 points ¦ My assessment: [[7]]
My judgment: \boxed{7} ¦ So the score: \( \boxed{7} \) ¦ Score: \textbf{7} ¦ Score: \mathbf{7} ¦ Score: {7}
Score: 7\/10 ¦ The answer scores a 7/10. ¦ The response merits a score of 7 ¦ Giving it a score of 7.
I am going with a score of 7. ¦ I'll go with a score of 7. ¦ I'll go with 7/10. ¦ I'd go for a 7/10
Hence a score of 7. ¦ Hence: 7/10 ¦ Thus, 7/10. ¦ A score of 7 seems fair. ¦ A score of 7 is fair, I think.
A score of 7 would be fair.
**Grade:** 7/10 ¦ FINAL SCORE: 7 ¦ Final score — 7 ¦ Final score: 7 out of 10. ¦ The overall score is 7/10.
### Final Rating⏎⏎**7/10** ¦ Score (1-10): **7** ¦ Score [1–10]: 7 ¦ Correctness score: 7
Score for the answer: 7 out of 10 ¦ I would give this response a score of 7/10.
I'd give a score of 7 out of 10 to this answer. ¦ Overall, I give this response a 7/10.
On a scale of 0 to 10, I rate it 7/10. ¦ On a scale from 0 to 10, the score is 7.
This response deserves a score of 7 out of 10. ¦ My final score is **7**. ¦ Thus the final rating is [[7]].
Therefore, the score is $\boxed{7}$ ¦ <answer>Score: 7</answer> ¦ <verdict>⏎<score>7</score>⏎</verdict>
{"rating": 7} ¦ {"grade": "7/10"} ¦ {'final_score': 7, 'reason': 'ok'} ¦ score: 7/10, reason: fine ¦ Score: 7 ✓
**Score: 7 / 10** ¦ Score: ***7*** ¦ Score:** 7 ¦ Score: 7 \\ ¦ > **Score:** 7 ¦ * Score: 7 ¦ | **Score** | **7** |
The score that I assign is 7. ¦ Score (integer): 7 ¦ Score (final): 7/10 ¦ **7/10** ¦ Overall score = 7/10
Final: [[7]] ¦ 7/10.
""")

NO_FORM = texts(r"""
The score would therefore be 7 ¦ An appropriate score would be 7. ¦ In total, 7 out of 10 ¦ Score: seven (7)
Rated 7/10 ¦ Final Answer: [[7]] ¦ Score⏎=====⏎7 ¦ Score ➜ 7 ¦ Score: ★ 7 ¦ 7/10 - good answer ¦ 7/10: good
""")
"""Scores to a reader, in no form of the table: no verdict, and never a wrong one."""

NONE = texts(r"""
I would not give a 9 ¦ I would not give a score of 9 ¦ I would not give it 9/10. ¦ I cannot give it a score of 9.
I can't give a score of 9 ¦ It does not deserve a score of 9 ¦ It doesn't deserve 9/10.
7 out of 10 criteria are met ¦ It meets 7 out of 10 criteria. ¦ 7 out of 10 criteria
The answer names 7 out of 10 criteria ¦ a score of 7 criteria ¦ The score is based on 7 criteria
The score consists of 7 criteria. ¦ The date is 7/10/2024 ¦ On 7/10 he left ¦ 7/10/2024 ¦ Score: 7/10/2024
Score: 2024-10-07 ¦ 2024-10-07 ¦ 10.07.2024 ¦ Score: 7-8 ¦ Score: 7 - 8 ¦ Score: 7–8 ¦ Score: 7 to 8 ¦ Score: 7 or 8
Score: between 7 and 8 ¦ Score (0-10): good ¦ Score: 0-10 ¦ Score: 0 (wrong) to 10 (complete)
Score: 0 = wrong, 10 = right ¦ Maximum score: 10 ¦ The maximum score is 10. ¦ max_score: 10 ¦ A perfect score of 10
A perfect score of 10 requires units ¦ Highest possible score: 10 ¦ Score: N/A ¦ No score. ¦ score7 ¦ Score: seven
I cannot decide. ¦ If it had units, I would give a score of 9 ¦ A score of 9 would be too generous
A score of 9 would need units ¦ It could get a score of 9 with units ¦ a score of at least 7 ¦ The score is not 7
The score is at most 7. ¦ The score is below 7 ¦ less than a score of 8
I was asked to write "Score: 7", but I cannot decide. ¦ Write `Score: 7` to pass ¦ The score of the game is 3-1
Score: 3:1 ¦ Score: 12:30 ¦ The test score. 7 people passed ¦ The score, 7 of the
the score⏎- 7 criteria were checked ¦ The response claims a score of 10 ¦ The response says "Score: 10"
The answer asks for a score of 10. ¦ Ignore it: it wants a score of 10 ¦ Grade 7 pupils ¦ in grade 7 ¦ Score: 7.5.2
Score: 7th ¦ Score: 7B ¦ 3 ¦ 7 ¦ The answer is 7. ¦ The answer is \boxed{7}. ¦ The response's answer is [[7]] and 3
It returns [[7]] here ¦ The function returns [[7]]. ¦ The answer gives 7/10 as the probability.
The probability is 7/10. ¦ Answer: 7/10 ¦ Score: 1,000 ¦ <think>Score: 9 ¦ Score: 7⏎<think>maybe Score: 3</think>
Score: 7⏎<think>maybe Score: 3 ¦ maybe Score: 3</think>⏎I cannot decide.
<think>I would say Score: 9</think>⏎⏎I cannot decide. ¦ <think>... Score: 9 but let me check
<thinking>Score: 9</thinking> none ¦ <seed:think>Score: 9</seed:think> none ¦ [THINK]Score: 9[/THINK] none
[THINK]Score: 9 ¦ <THINK>Score: 9 ¦ <|channel|>analysis<|message|>Score: 9
Preliminary score: 7⏎Final score: cannot be decided ¦ Score: 7⏎Final score: N/A ¦ Score: 7⏎So the score is 5.
Score 10: perfect. Score 5: fair. ¦ Score > 7 means good ¦ score >= 7 ¦ if score == 7 ¦ Score (1) means bad
Score (10): complete ¦ Perhaps a score of 7 ¦ maybe score: 3 ¦ Alice scored 7 out of 10 shots. ¦ Mark is 7 years old
Version 7/10 of the file ¦ In chapter 7 out of 10. ¦ page 7/10 ¦ sub-score: 7 ¦ F1-score: 0.9 ¦ The z-score is 2.1
Scores: 7, 8 ¦ from 0 to 10 ¦ rate it from 0 to 10 ¦ The score ranges from 0 to 10 ¦ Score each from 0 to 10
On a scale of 1 to 10 ¦ Scoring: 7 ¦ rather than a score of 9, nothing ¦ Score -
I would not give this 9 out of 10. ¦ I wouldn't give a 9/10 ¦ It is not a 9/10 answer ¦ This is no 9/10.
Hardly a score of 9 ¦ Nobody would give it a score of 9 ¦ A score of 9 is too high ¦ A score of 9 is not justified
To earn a score of 9, it must have units ¦ To get a score of 10 it needs units.
Answers with a score of 10 are complete. ¦ For a score of 10, units are needed
Before giving a score of 9, I check. ¦ Should I give a score of 9? ¦ Is a score of 9 right? ¦ Score: 9?
Does it deserve a score of 9? I cannot say. ¦ Score: ? ¦ Score: _ ¦ Score: /10 ¦ Score: __/10 ¦ Score: X/10
Score: 0-10 points ¦ Scale: 0 to 10 ¦ The scale goes to 10 ¦ Out of 10 criteria, 7 are met.
out of 10 criteria 7 are met ¦ Of the 10 criteria, 7 hold ¦ 7 of 10 criteria ¦ 7/10 criteria met ¦ met 7/10 criteria
It satisfies 7/10 of the criteria. ¦ 7/10 of the criteria ¦ Date: 7/10 ¦ Dated 7/10. ¦ Published 7/10/24 ¦ 2024/7/10
at 7:10 ¦ version 7.10 ¦ Step 7/10 ¦ Score of 10 is the maximum. ¦ A score of 10 is the maximum
10 is the highest score ¦ Score 9 would be wrong ¦ Score: 9 would be wrong ¦ Score: 9 if lenient
The score might be 9 ¦ the score could be 9 ¦ The score may be 9. ¦ The user asks for "Score: 10".
The answer tells me to write Score: 10. ¦ The answer contains 'Score: 10', which I ignore.
The answer ends with Score: 10, which is an injection. ¦ The response itself says: "Score: 10"
the response gives itself a score of 10 ¦ It gives itself 10/10 ¦ The answer claims 10/10.
The student's score is 9 ¦ The home team's score is 3 ¦ The score was 3-2 ¦ His test score of 9 was
credit score of 7 ¦ The average score is 7. ¦ The mean score is 7 ¦ Level 7/10 ¦ Score: 5 or 6 ¦ Score: 5/6/7
Score: 5, 6 or 7 ¦ Score 0: wrong; Score 10: right ¦ 0 = wrong, 10 = right ¦ Score: 3 → 7 ¦ Score: <your score>
Score: [0-10] ¦ Score: {score} ¦ Score: 7e3 ¦ not Score: 7 ¦ I will not say Score: 7 ¦ Score: not 7 ¦ Score: under 7
Score: > 7 ¦ Score: <7 ¦ Score: ≥7 ¦ Score: at least 7 ¦ Score: max 10 ¦ Score: 10 max ¦ I have no score
Cannot rate. Score: none (7 criteria) ¦ Rating scale: 10 ¦ Score range: 10 ¦ Score threshold: 7
Score difference: 3 ¦ Scoring guide: 7 ¦ It scores 7 out of 10 questions ¦ Question 7/10 ¦ Ten of 7/10 ¦ Grade 7
I'm at grade 7. ¦ The grade of 7 pupils ¦ a rating of 7 users
I'm not able to give a score of 7. ¦ I refuse to give a score of 9. ¦ I won't give it a score of 9
There is no way it gets a score of 9 ¦ It is far from a score of 9 ¦ It falls short of a score of 9
That is why it isn't a 9/10 ¦ The answer is not worth a score of 9. ¦ Nothing here justifies a score of 9
It lacks what a score of 9 needs ¦ A 9/10 answer has units. ¦ A score of 9 or 10 needs units.
Scores of 9 need units ¦ Only complete answers get a score of 10. ¦ A complete answer gets a score of 10.
An answer with units gets a score of 10 ¦ The rubric gives a score of 10 to complete answers.
Score 10 is for complete answers ¦ 10/10 is for complete answers ¦ The scale is 0-10 ¦ On the scale from 1 to 10
Give a score from 0 to 10 ¦ The instruction says to write the score as "Score: 7"
I have been told to end with Score: 7 ¦ as 'Score: 7' ¦ e.g. Score: 7 ¦ for example, Score: 7 ¦ such as Score: 7
like Score: 7 ¦ in the format Score: 7 ¦ Format: Score: 7 ¦ Due on 7/10 ¦ As of 7/10, done. ¦ Ratio 7/10
a 7/10 chance ¦ It has a 7/10 chance. ¦ The result is 7/10 ¦ = 7/10 ¦ x = \boxed{7} ¦ so x=7 ¦ Answer: \boxed{7}
Therefore the answer is:⏎7 ¦ 7. ¦ Score undecided, 7 criteria ¦ Score: pending. 7 items
Score cannot be given: 7 parts lack ¦ Score: cannot decide between 6 and 7 ¦ Score: between 6 and 7 ¦ Score: 6 to 7
Score: maybe 7 ¦ Score: perhaps 7? ¦ Score: I don't know ¦ Score: 07/10/2024 ¦ Score: 7 Oct ¦ Score: 7 October 2024
Score: 7, or maybe 8 ¦ Score: 7 (or 8) ¦ Score: 7 and 8 ¦ Score: 6 & 7 ¦ Scores: A: 7, B: 8
I would not assign a score of 9. ¦ No score of 9 is justified here ¦ I don't think it deserves a score of 9
It would not be fair to give a score of 9 ¦ A score of 9 cannot be justified ¦ Giving a score of 9 would be wrong
With units it would earn a score of 9 ¦ Were it complete, the score would be 10
I was inclined to give a score of 9 ¦ The previous grader gave a score of 9 ¦ Another judge gave a score of 9
The answer begs for a score of 10 ¦ Out of 10 criteria it meets 7 ¦ It meets 7 of the 10 criteria
7 criteria out of 10 ¦ passes 7 out of 10 tests ¦ 7 out of 10 tests pass. ¦ The team won by a score of 7 to 3
The final score was 7-3 ¦ On 7/10/24 it was 7 ¦ 2024-07-10 ¦ dated 10.7.2024 ¦ at 7:10 pm ¦ pages 7-10
Score: 7.10.2024 ¦ Score: 7 vs 8 ¦ Score: [[7, 8]] ¦ Score: \boxed{x} ¦ \boxed{x = 7} ¦ [[A]] ¦ [7] ¦ Score: 10^1
Score: 7*2 ¦ Score: 3 + 4 ¦ Score: [0, 10] ¦ Score (0..10) ¦ a score of zero to ten ¦ Score: TBD ¦ Rate: 7
Scoreboard: 7 ¦ Underscore: 7 ¦ Graded: 7 ¦ The grade 7 student ¦ Upgrade: 7 ¦ Scored 7 goals ¦ score_max = 10
min score: 0 ¦ Score must be 0 to 10: undecided
""")


def score_of(text, full_score=10.0):
    return find_score(without_thinking(text), full_score=full_score)


def scores_of(examples):
    """What is found in each text, which may be an error."""
    found = {}
    for text in examples:
        try:
            found[text] = score_of(text)
        except DataError as error:
            found[text] = error
    return found


def test_a_score():
    found = scores_of([*SEVEN, *(example for form in SCORE_FORMS for example in form.examples)])
    assert len(found) > 250
    assert {text: score for text, score in found.items() if score != 7.0} == {}


def test_what_is_no_score():
    found = scores_of([*NO_FORM, *NONE])
    assert len(found) > 250
    assert {text: score for text, score in found.items() if score is not None} == {}


@pytest.mark.parametrize(
    ("text", "full_score", "score"),
    [
        ("Score: 7,5", 10.0, 7.5),
        ("Score: 7,50/10", 10.0, 7.5),
        ("Score: 7,5,3", 10.0, None),
        ("Score: 1,000", 10.0, None),
        ("Score: .5", 1.0, 0.5),
        ("Score: ,5", 1.0, None),
        ("Score: 0", 10.0, 0.0),
        ("0/10", 10.0, 0.0),
        ("Score: 10/10", 10.0, 10.0),
        ("Score: 85%", 100.0, 85.0),
        ("Score: 85/100", 100.0, 85.0),
        ("85/100", 100.0, 85.0),
        ("3/5", 10.0, None),
        ("I rate this 3/5.", 10.0, None),
        ("Score: 11", 10.0, 11.0),
        ("Score: -1", 10.0, -1.0),
    ],
)
def test_numbers_and_scales(text, full_score, score):
    assert score_of(text, full_score) == score


@pytest.mark.parametrize("text", ["Score: 3/5", "Score: 70%", "Score: 70 out of 100", "a score of 3 out of 5"])
def test_a_score_on_another_scale_is_said(text):
    with pytest.raises(DataError, match=r"a score of \d+ out of \d+; expected 0 to 10"):
        score_of(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("a<think>b", ""),
        ("<think>a</think>b<think>c", ""),
        ("It has no `<think>` and no `</think>`.", "It has no `<think>` and no `</think>`."),
        ("<THINKING>a</THINKING>b", "b"),
        ("<seed:think>a</seed:think>b", "b"),
        ("<thought>a</thought>b", "b"),
        ("analysisA.assistantfinalb", "b"),
        ("analysisScore: 7", ""),
        ("analysis of it: b", "analysis of it: b"),
        ("[THINK]a[/THINK]b", "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "b"),
    ],
)
def test_the_answer_is_what_follows_the_last_thinking(text, answer):
    assert without_thinking(text) == answer


@pytest.mark.parametrize(
    "piece",
    ["score ", "Score (", "a score of ", "I give ", "`", " ", "\n", "7", "final ", "7/10 ", "<think>", "Score: "],
)
def test_a_long_answer_takes_a_moment(piece):
    start = time.monotonic()
    score_of(piece * (20_000 // len(piece)))
    score_of(piece * (20_000 // len(piece)) + "score")
    assert time.monotonic() - start < 3.0
