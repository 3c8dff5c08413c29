"""Published data sets: where each lies on the hub, and what in its columns makes a task.

One entry a data set, with the schema of the cited card or paper. The same entry reads local files of that schema (JSONL,
Parquet, a directory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.tasks.readers import (
    AsTexts,
    Choices,
    Fill,
    LetterAt,
    Listed,
    Read,
    Reader,
    RightLetter,
    contest_question,
    contest_tests,
)

COUNTDOWN_WORDING = "Use each of the numbers {numbers} exactly once to write an expression with + - * / that equals {target}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One data set. `facts` that a row leaves out or empty are left out of its task; question and answer must be there.

    Rows that are not as `where` says are no tasks to play, as their publishers put it, and are left out unless a recipe says
    otherwise. A set without a `test_split` has but one split, which is trained on.
    """

    hub: str
    question: Reader
    answer: Reader
    source: str  # who publishes the schema, and where
    facts: Mapping[str, Reader] = field(default_factory=dict)
    id: Reader | None = None  # by default the row's place
    subset: str | None = None
    train_split: str = "train"
    test_split: str | None = "test"
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # columns, and the values of rows that are tasks


_VERL = {"ability": Read("ability"), "data_source": Read("data_source"), "index": Read("extra_info.index")}
_PROBLEM, _ANSWER = Read("problem"), Read("answer")
_GPQA = Choices("Question", "Correct Answer", tuple(f"Incorrect Answer {number}" for number in (1, 2, 3)))

PUBLISHED: Mapping[str, Published] = {
    "gsm8k": Published(
        hub="openai/gsm8k",
        subset="main",
        question=Read("question"),
        answer=Read("answer", after="####"),
        facts={"solution": Read("answer", before="####")},
        source="Cobbe et al., 2021 (arXiv:2110.14168); data card of openai/gsm8k",
    ),
    "math": Published(
        hub="DigitalLearningGmbH/MATH-lighteval",  # all subjects; EleutherAI/hendrycks_math has the same columns, by subject
        question=_PROBLEM,
        answer=Read("solution", is_boxed=True),
        facts={"solution": Read("solution"), "level": Read("level"), "subject": Read("type")},
        source="Hendrycks et al., 2021 (arXiv:2103.03874); columns problem, level, type, solution",
    ),
    "math500": Published(
        hub="HuggingFaceH4/MATH-500",
        question=_PROBLEM,
        answer=_ANSWER,
        facts={"solution": Read("solution"), "subject": Read("subject"), "level": Read("level")},
        id=Read("unique_id"),
        source="Lightman et al., 2023 (arXiv:2305.20050); data card of HuggingFaceH4/MATH-500",
        train_split="test",
    ),
    "aime24": Published(
        hub="HuggingFaceH4/aime_2024",
        question=_PROBLEM,
        answer=_ANSWER,
        facts={"solution": Read("solution"), "url": Read("url")},
        source="data card of HuggingFaceH4/aime_2024: id, problem, solution, answer, url, year",
        test_split="train",
    ),
    "aime25": Published(
        hub="math-ai/aime25",
        question=_PROBLEM,
        answer=_ANSWER,
        source="data card of math-ai/aime25: problem, answer, id",
        train_split="test",
    ),
    "hmmt25": Published(
        hub="MathArena/hmmt_feb_2025",
        question=_PROBLEM,
        answer=_ANSWER,
        source="Balunovic et al., 2025 (MathArena, arXiv:2505.23281); columns problem_idx, problem, answer, problem_type",
        test_split="train",
    ),
    "amc23": Published(
        hub="math-ai/amc23",
        question=Read("question"),
        answer=_ANSWER,
        source="data card of math-ai/amc23: id, question, answer, url",
        train_split="test",
    ),
    "gpqa-diamond": Published(
        hub="Idavidrein/gpqa",  # one has to agree to its terms, and not to print its questions
        subset="gpqa_diamond",
        question=_GPQA,
        answer=RightLetter(_GPQA),
        facts={"domain": Read("High-level domain"), "subdomain": Read("Subdomain")},
        source="Rein et al., 2023 (GPQA, arXiv:2311.12022); Question, Correct Answer, Incorrect Answer 1 to 3, Record ID, ...",
        test_split="train",
    ),
    "mmlu": Published(
        hub="cais/mmlu",
        subset="all",
        question=Listed("question", "choices"),
        answer=LetterAt("answer"),
        facts={"subject": lambda row: Read("subject")(row).replace("_", " ")},
        source="Hendrycks et al., 2020 (MMLU, arXiv:2009.03300); columns question, subject, choices, answer (a number from 0)",
        train_split="auxiliary_train",
    ),
    "ceval": Published(
        hub="ceval/ceval-exam",  # a subset for each of 52 subjects
        question=Listed("question", ("A", "B", "C", "D")),
        answer=Read("answer"),
        source="Huang et al., 2023 (C-Eval, arXiv:2305.08322); columns id, question, A to D, answer (none in the test split)",
        train_split="dev",
        test_split="val",
    ),
    "dapo-math-17k": Published(
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        question=Read(
            "prompt",
            role="user",
            after="where $Answer is the answer to the problem.\n\n",
            before="\n\nRemember to put your answer on its own line",
        ),
        answer=Read("reward_model.ground_truth"),
        facts=_VERL,
        source="Yu et al., 2025 (DAPO, arXiv:2503.14476); its file holds each problem about a hundred times",
        test_split=None,
    ),
    "dapo-math-17k-processed": Published(
        hub="open-r1/DAPO-Math-17k-Processed",
        subset="en",
        question=Read("prompt"),
        answer=Read("solution"),
        facts=_VERL,
        source="data card of open-r1/DAPO-Math-17k-Processed: prompt, solution, data_source, ability, reward_model, extra_info",
        test_split=None,
    ),
    "openmathreasoning": Published(
        hub="nvidia/OpenMathReasoning",
        question=_PROBLEM,
        answer=Read("expected_answer"),
        facts={
            "problem_type": Read("problem_type"),
            "problem_source": Read("problem_source"),
            "pass_rate_72b_tir": Read("pass_rate_72b_tir"),
        },
        source="Moshkov et al., 2025 (arXiv:2504.16891); splits cot, tir, genselect, additional_problems",
        train_split="cot",
        test_split=None,
        # Of no_answer_extracted and converted_proof the expected answer is what most of a model's solutions say.
        where={"problem_type": ("has_answer_extracted",)},
    ),
    "project-euler": Published(
        hub="PatrickHaller/pecc",
        subset="euler",
        question=Read("description"),
        answer=Read("solution"),
        facts={"title": Read("title"), "difficulty": Read("difficulty")},
        source="Haller et al., 2024 (PECC, arXiv:2404.18766); id, title, description, difficulty, solution, ...",
        train_split="test",
        test_split=None,
    ),
    "countdown": Published(
        hub="Jiayi-Pan/Countdown-Tasks-3to4",
        question=Fill(COUNTDOWN_WORDING, numbers=Read("nums", is_list=True), target=Read("target")),
        answer=Read("target"),
        facts={"numbers": Read("nums", is_list=True), "target": Read("target")},
        source="Pan et al., 2025 (TinyZero); columns target, nums",
        test_split=None,
    ),
    "apps": Published(
        hub="codeparrot/apps",
        question=Read("question"),
        answer=Read("input_output"),  # tests, as `kind = "code"` reads them
        facts={"difficulty": Read("difficulty"), "url": Read("url")},
        source="Hendrycks et al., 2021 (APPS, arXiv:2105.09938); problem_id, question, input_output, difficulty, url, ...",
    ),
    "livecodebench": Published(
        hub="livecodebench/code_generation_lite",  # JSON lines that a script of its own loads: read the files
        question=contest_question,
        answer=contest_tests,
        facts={"difficulty": Read("difficulty"), "platform": Read("platform"), "contest_date": Read("contest_date")},
        id=Read("question_id"),
        source="Jain et al., 2024 (LiveCodeBench, arXiv:2403.07974); columns question_content, starter_code, contest_date,"
        " public_test_cases, private_test_cases, metadata, ...",
        train_split="test",
    ),
    "tulu3-math": Published(
        hub="allenai/RLVR-MATH",
        # Four worked examples stand before the problem, in the same message.
        question=Read("messages", role="user", after="Question: "),
        answer=Read("ground_truth"),
        facts={"dataset": Read("dataset")},
        source="Lambert et al., 2024 (Tulu 3, arXiv:2411.15124), RLVR-MATH and RLVR-GSM; messages, ground_truth, dataset",
        test_split=None,
    ),
    "tulu-3-sft-personas-math-filtered": Published(
        hub="allenai/tulu-3-sft-personas-math-filtered",
        question=Read("messages", role="user"),
        answer=Read("messages", role="assistant", is_parsed=True),
        facts={"response": Read("messages", role="assistant")},
        source="Lambert et al., 2024 (Tulu 3, arXiv:2411.15124); columns id, prompt, messages",
        test_split=None,
    ),
    "dart-math-uniform": Published(
        hub="hkust-nlp/dart-math-uniform",
        question=Read("query"),
        answer=Read("response", is_parsed=True),
        facts={"response": Read("response")},
        source="Tong et al., 2024 (DART-Math, arXiv:2407.13690); columns query, response",
        test_split=None,
    ),
    "arpo-mix": Published(
        hub="dongguanting/ARPO-RL-Reasoning-10K",
        question=Read("extra_info.question"),
        answer=Read("reward_model.ground_truth"),
        facts=_VERL,
        source="Dong et al., 2025 (ARPO, arXiv:2507.19849), the reasoning and the deep-search mix alike; verl's columns",
    ),
    "arpo-eval": Published(
        hub="",  # the files are next to the authors' code
        question=Read("question"),
        answer=Read("answer", is_first=True),
        facts={"references": AsTexts("answer")},  # every text that is right
        source="Dong et al., 2025 (ARPO, arXiv:2507.19849), its files of HotpotQA, Bamboogle, WebWalkerQA, xbench and the like;"
        " question, answer (a text, a number or a list)",
    ),
    "gaia": Published(
        hub="",  # the file is next to ARPO's code
        question=Read("Question"),
        answer=Read("answer"),
        facts={"references": AsTexts("answer"), "level": Read("Level")},
        id=Read("task_id"),
        source="Mialon et al., 2023 (GAIA, arXiv:2311.12983), as in ARPO's files; task_id, Question, answer, Level",
    ),
    "hle": Published(
        hub="",  # likewise
        question=Read("question"),
        answer=Read("answer"),
        facts={"references": AsTexts("answer"), "answer_type": Read("answer_type"), "category": Read("category")},
        source="Phan et al., 2025 (Humanity's Last Exam, arXiv:2501.14249), as in ARPO's files; question, answer, answer_type,"
        " has_image, category",
        where={"has_image": ("false",)},
    ),
    "flashrag": Published(
        hub="RUC-NLPIR/FlashRAG_datasets",  # subsets hotpotqa, 2wikimultihopqa, musique (split dev), bamboogle (split test)
        question=Read("question"),
        answer=Read("golden_answers", is_first=True),
        facts={"references": AsTexts("golden_answers")},
        id=Read("id"),
        source="Jin et al., 2024 (FlashRAG, arXiv:2405.13576), multi-hop QA of many authors; id, question, golden_answers",
        test_split="dev",
    ),
    "strop": Published(
        hub="",
        question=Read("question"),
        answer=Read("answer"),
        facts={},  # those of the row's own `facts` are added to every task
        id=Read("id"),
        source="kept.jsonl of `strop data curate`; columns id, question, answer, source, facts",
    ),
}
"""By the name that `tasks.dataset` takes."""
