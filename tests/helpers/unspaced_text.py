"""Chinese, Japanese and Thai text, with some English, for tests of scripts without spaces between words."""

import random

CHINESE = (
    "今天的天气很好，我们去公园散步。",
    "他说：“明天会下雨吗？”",
    "这台计算机用Python写程序，速度很快！",
    "图书馆在学校的东边，离车站不远。",
    "2020年他搬到了北京，开始新的工作。",
    "老师把书放在桌子上，学生们都在看。",
)
JAPANESE = (
    "今日はとても天気がいいので、公園を散歩しました。",
    "「明日は雨ですか」と彼は聞いた。",
    "このコンピューターはPythonで書かれたプログラムを動かす。",
    "図書館は学校の東にあって、駅から遠くない。",
    "彼女は大学でフランス語を勉強していた。",
    "先生は本を机の上に置いた！",
)
THAI = (
    "วันนี้อากาศดีมากเราจึงไปเดินเล่นที่สวนสาธารณะ",
    "เขาถามว่าพรุ่งนี้ฝนจะตกหรือไม่",
    "คอมพิวเตอร์เครื่องนี้ใช้Pythonเขียนโปรแกรม",
    "ห้องสมุดอยู่ทางตะวันออกของโรงเรียน",
    "เธอเรียนภาษาฝรั่งเศสที่มหาวิทยาลัย",
    "ครูวางหนังสือไว้บนโต๊ะ",
)


def documents(count: int) -> list[str]:
    """Documents of one language each, with lines of several sentences."""
    generator = random.Random(0)
    texts = []
    for number in range(count):
        sentences, between = [(CHINESE, ""), (JAPANESE, ""), (THAI, " ")][number % 3]
        lines = [between.join(generator.choices(sentences, k=generator.randint(1, 5))) for _ in range(4)]
        texts.append("\n".join(lines))
    return texts
