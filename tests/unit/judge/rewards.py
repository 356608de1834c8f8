"""A reward that asks the judge in its own words."""


async def agrees(request):
    answer = await request.judge.chat([{"role": "user", "content": f"Is {request.response} right?"}])
    return float(answer.text == "yes")
