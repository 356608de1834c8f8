"""An agent whose episodes branch: the best of two answers, a helper with a prompt of its own, a history that is cut."""

import openai


def agent(row, *, base_url, api_key):
    """One episode of five turns; what is returned is the reward."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=3600)

    def answers(*messages, **more):
        found = client.chat.completions.create(model="policy", messages=list(messages), **more)
        return [choice.message.content or "" for choice in found.choices]

    prompt = row["prompt"]
    chosen = max(answers(*prompt, n=2))
    (advice,) = answers(user(f"Check this: {chosen[:40]}"))
    (checked,) = answers(*prompt, {"role": "assistant", "content": chosen}, user(f"Again: {advice[:20]}"))
    (last,) = answers(*prompt[:-1], user(f"{prompt[-1]['content']} {checked[:20]}"))
    return float(row["answer"] in last)


def user(text):
    return {"role": "user", "content": text}
