"""A reward that asks the judge in its own words."""


async def agrees(request):
    answer = await request.judge.chat([{"role": "user", "content": f"Is {request.response} right?"}])
    return float(answer.text == "yes")


async def asks_twice(request):
    first = await request.judge.chat([{"role": "user", "content": f"Is {request.response} short?"}])
    second = await request.judge.chat([{"role": "user", "content": f"Is {request.response} polite?"}])
    return float(first.text == second.text == "yes")


async def asks_about_some(request):
    return await agrees(request) if request.response in "abcdgh" else 0.0
