"""An agent as a graph of LangGraph: the model, its tools, and an edge back.

``uv pip install langgraph langchain-openai``, then ``--environment.name examples/own_agent/with_langgraph.py:agent``;
the rows have a text as prompt, and the number as answer.
"""

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

MAX_ANSWERS = 3


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


def calculator(*, base_url: str, api_key: str) -> Any:
    """The graph."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, timeout=3600).bind_tools([add, multiply])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([add, multiply]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    return graph.compile()


async def agent(row: dict[str, Any], *, base_url: str, api_key: str) -> float:
    """One episode; an answer that is no number, such as a call that cannot be read, is asked for again."""
    graph = calculator(base_url=base_url, api_key=api_key)
    messages = [("system", "You solve problems with your tools."), ("user", row["prompt"])]
    for _ in range(MAX_ANSWERS):
        messages = (await graph.ainvoke({"messages": messages}))["messages"]
        answer = messages[-1].text.strip()
        if answer.isdigit():
            return float(answer == row["answer"])
        messages = [*messages, ("user", "Answer with the number alone.")]
    return 0.0
