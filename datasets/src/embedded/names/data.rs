//! What people ask a town's desk for, and how its names are built.

/// Each intent with the ways to say it, one a line: `(a|b)` chooses, `[slot]` fills a slot from the
/// rule of its name, `[slot:rule]` from another rule.
#[rustfmt::skip]
pub(super) const REQUESTS: &[(&str, &str)] = &[
    ("borrow", "
        (please|) (reserve|borrow|hold|set aside) [work] (by [author]|) (for me|) (at [place]|) ([when]|)
        i (want|would like|need) to (borrow|take home|read) (the [kind]|) [work] (by [author]|) ([when]|)
        is [work] (still|) on the shelf (at [place]|)
        (get|bring|lend) me (the [kind]|a [kind] called|) [work] (from [place]|) ([when]|)
        have you got [work] (in the [town] branch|in [town]|at [place]|)
        can [person] pick up [work] ([when]|)
        renew [work] (until|for) [when]
        keep [work] (at [place]|) for [person] ([when]|)
        i will bring back [work] [when]
        (hold|keep) the [kind] [work] for me
        (get|bring|reserve|book|want) [work] ([when]|)
        [work] [when] (please|)
        i want [work] (from [author]|from [place]|)
        (send|give) me [work]
        (send|give) [person] [work] ([when]|)
        is [work] in ([when]|)
        take [work] (home|) ([when]|)"),
    ("search", "
        (find|look up|search for|look for) (the [kind]|a [kind] called|) [work]
        (find|look up|search for|look for) [work] (by [author]|)
        who (wrote|made|painted|sang) (the [kind]|) [work]
        show me (everything|all|the works) (by|from) [author]
        (tell me about|what is) [work]
        where can i (watch|read|hear|see) [work] (by [author]|)
        (find|look for|look up) [author]
        i am looking for (a|the) [kind] (called|named|titled) [work]
        (has|did) [author] (written|write) (a [kind]|anything) (called [work]|)
        (open|show me|play me) the [kind] [work] (by [author]|)
        which [kind] has [work] in it
        show [work]
        what (about|of) [work]
        [work] by [author]
        (get|give) me (everything|more) (on|by) [author]
        [kind] [work]
        open [work]
        (who|what) is [author]"),
    ("visit", "
        (when|what time) does [place] (open|close) ([when]|)
        (how do i get|take me|show me the way|directions) to [place] (in [town]|)
        is [place] (open|busy|closed) ([when]|)
        (find|look for|look up|search for) [place] (in [town]|)
        (how far|where) is [place] (from [place]|from [town]|)
        (tell me about|what is) [place]
        show me a map of [town]
        how is the road to [town] [when]
        what is there to see in [town] ([when]|)
        (how do i get|the next bus) from [town] to [town]
        can i walk from [place] to [place]
        show [place]
        what (about|of) [place] ([when]|)
        (get|take) me to [place] [town]
        is [place] [town] open [when]
        [place] [when]
        how is [place] ([when]|)
        [place] (in|by|near) [town]
        i want (to go to|) [place] ([when]|)
        is [town] far from [place]
        (who|what) is [place]"),
    ("reserve", "
        (book|reserve|get) (a table|seats|a room|tickets) (at|in) [place] (for [count]|) ([when]|)
        (book|reserve) [place] for [count] (people|of us|) ([when]|)
        we are [count] and want to eat in [town] [when]
        i need (a table|seats|a room) for [count] in [town] (at [place]|) ([when]|)
        put [person] down for [place] ([when]|)
        (hold|reserve) [count] seats for [work] (at [place]|) ([when]|)
        get [count] tickets (for|to) [work] (in [town]|) ([when]|)
        a table for [count] at [place]
        (is there|get me) (a seat|a table) at [place] [when]
        book [work] at [place] for [count]
        [count] at [place] [when]
        (book|reserve|get) [place] ([when]|)
        (give|get) [person] (a seat|a table|a room) (at|in) [place] ([when]|)
        [place] for [count] ([when]|)
        (put|book) [person] [place] [when]
        (book|reserve) [town] for [count] [when]"),
    ("review", "
        (give|rate) [work] [score] (stars|points|out of ten|)
        i (loved|hated|liked|finished) [work] (by [author]|) (give it [score]|it gets [score])
        [score] (stars|points) for [work]
        my mark for (the [kind]|) [work] is [score]
        rate the [kind] [work] (by [author]|) [score] (stars|points|)
        [work] (was|is) worth [score] (stars|points)
        [score] out of ten for (the [kind]|) [work] (by [author]|)
        (mark|score) [work] as [score]
        (give|rate) (this|the current) [kind] [score] (stars|points)
        how is [work] [score]
        [work] [score]
        [work] by [author] [score]
        give [place] [score]
        [score] for [place]
        (i|we) (loved|hated|liked) [place] (in [town]|) (give it [score]|)
        give [author] [score]"),
    ("contact", "
        (tell|text|message|write to) [person] (that|) [note]
        (call|ring|phone) [person] ([when]|)
        let [person] know (that|) [note]
        send [person] the message [note]
        send [note] to [person]
        ask [person] (if|whether) [note]
        say [note] to [person] ([when]|)
        (tell|remind) [person] [when] that [note]
        message [person] at [place] (that|) [note]
        leave a note for [person] saying [note]
        [person] [note]
        (get|find) [person] ([when]|)
        (tell|text|ask) [person] [when] [note]
        send [note] [when] to [person]
        (give|send) [person] (word|this) [note]
        [person] at [place] [note]
        (text|tell|ask) [note]"),
    ("collect", "
        (add|put) [work] (by [author]|) (to|on) (my|the|) [list] (list|)
        add [author] to (my|the|) [list] (list|)
        (put|add) (this [kind]|this) (on|to|in) (my|) [list]
        (start|make|create) a (new|) list (called|named) [list]
        (take|remove|drop) [work] (from|off) (my|the|) [list] (list|)
        what is on (my|the|) [list] (list|)
        [work] belongs on (my|) [list]
        move [work] (from [list]|) to [list]
        put the [kind] [work] (in|on) [person] 's [list] (list|)
        (read|show) me (my|) [list] (list|)
        show [list]
        open [list]
        (put|add|move) [work] [list]
        (put|add) [place] (to|on|in) [list]
        (put|add) [person] (to|on|in) [list]
        give [work] (to|) [list]
        (drop|take) [author] from [list]
        what (about|of) [list]
        is [work] (on|in) [list]"),
];

/// The rules whose values are names: a value of validation or test is new more often than not.
pub(super) const OPEN: [&str; 6] = ["work", "person", "place", "town", "list", "note"];

/// The slots whose rule has another name.
pub(super) const SLOT_RULES: [(&str, &str); 1] = [("author", "person")];

/// Rules: each line is one way, all as probable. `<rule>` expands, and `+` joins without a space.
#[rustfmt::skip]
pub(super) const RULES: &[(&str, &str)] = &[
    ("work", "
        (the|a|) <adjective> <noun>
        the <noun>
        <nouns>
        the <noun> of (the|) <noun>
        the <noun> (who|that) <past> (the|a|my) <noun>
        the man who <past> (the|) <nouns>
        <noun> and <noun>
        (how|where|when|why) (to <verb>|the <noun> <past>|i <past>) (a <noun>|the <nouns>|)
        (no|one|two|seven) <nouns> (in <town>|for <first>|before <time>|)
        <first> and the <adjective> <noun>
        (letters|a letter|songs) (to|for|from) <first>
        <past> by the <noun> (of <town>|)
        <plain>
        <plain> <plain>
        <person>
        <invented>
        (in|under|before|after|beyond) the <adjective> <noun>
        (my|your|her) <noun> (in|of|and) the <noun>
        i <past> (with|for|without) (you|<first>|the <nouns>)
        (nothing|everything|all) (that|) (the|i) <noun> <past>
        <adjective> <nouns> of <town>
        the <adjective> <noun> and the <noun> that <past> (it|away|) (at <time>|)"),
    ("person", "
        <first>
        <first>
        <first> <last>
        <first> <last>
        <first> <first> <last>
        (doctor|aunt|uncle|mister) <last>
        <first> (van|de|of) <last>
        <first> <noun>
        old <first>"),
    ("place", "
        the <adjective> <noun>
        the <noun> and <noun>
        <town> (library|hall|museum|station|market)
        the <town> (library|museum|house)
        <last> and <last>
        <first>+s (kitchen|bar|bakery|garden|)
        (cafe|bistro|house|hotel) <invented>
        <invented> (house|hall|inn|)
        the <noun> (room|inn|house|theatre|)
        <adjective> <nouns>
        (under|over|behind) the <noun>
        the (old|new) <noun> (on|by|at) the <noun>
        <plain> (bar|kitchen|)"),
    ("town", "
        <towna>+<townb>
        <towna>+<townb>
        <towna>+<townb>
        (upper|lower|north|old|new|saint) <towna>+<townb>
        <towna>+<townb> (on|by|under) (the|) <noun>
        <last>+s <townc>
        <noun>+<townb>"),
    ("list", "
        <adjective> (reading|evenings|music|<nouns>)
        <nouns> (and <nouns>|)
        (for|before) (the <noun>|<time>|<first>)
        (things|books|films) (to <verb>|for <first>|i <past>) (<time>|)
        <plain>
        <plain> <nouns>
        <first>+s (<nouns>|)
        (not|never|always) <adjective>
        the <adjective> (ones|<nouns>)
        <time> (<nouns>|with <first>)"),
    ("note", "
        (i am|we are|you are) (late|early|at the <noun>|in <town>)
        the <nouns> are (under|on|behind) the <noun>
        the <noun> is (<adjective>|ready|at <first>+s)
        (i|we|they) <past> (the|a|your) <noun> (<time>|)
        (do not|never) <verb> (the|my) <noun> (again|)
        dinner is at <time>
        (bring|find|buy) (a <noun>|the <adjective> <noun>|some <nouns>)
        (yes|no|thanks|<plain>)
        (i will|we will) <verb> (with <first>|the <nouns>|you) (<time>|)
        <first> <past> (it|the <noun>|<work>)"),
    ("first", "
        <firsta>+<firstb>
        <firsta>+<firstb>
        <firsta>+<firstm>+<firstb>"),
    ("last", "
        <lasta>+<lastb>
        <lasta>+<lastb>
        <lasta>+<firstm>+<lastb>
        <noun>+er"),
    ("invented", "
        <lasta>+<firstb>
        <firsta>+<firstm>+<firstm>
        <towna>+<firstm>+<firstb>"),
    ("when", "
        (today|tonight|tomorrow|now|later|soon|this evening|next week|at once)
        (on|next|by|this) <day>
        <day> (morning|evening|afternoon|)
        (at|before|after) <hour> (o'clock|tonight|tomorrow|on <day>|)
        in <number> (days|weeks|hours|minutes)"),
    ("time", "
        (today|tonight|tomorrow|noon|midnight|spring|winter)
        <day>
        <hour>"),
    ("day", "(monday|tuesday|wednesday|thursday|friday|saturday|sunday)"),
    ("hour", "(one|two|three|four|five|six|seven|eight|nine|ten|half past <number>|noon)"),
    ("number", "(two|three|four|five|six|seven|eight|nine|ten)"),
    ("count", "<number>
        (one|twelve|fifteen|twenty|a dozen|both of us|me and <first>)"),
    ("score", "(zero|one|<number>|<number>|four and a half|top|full)"),
    ("kind", "(novel|poem|atlas|comic|play|film|opera|song|album|picture|magazine|story|painting|documentary)"),
];

/// Words, whole or parts that join: those of all splits, of validation alone and of the test alone.
#[rustfmt::skip]
pub(super) const WORDS: &[(&str, [&str; 3])] = &[
    ("noun", [
        "river lamp orchard window sparrow garden mirror engine harbour ladder winter letter shadow teacher \
         doctor island kettle bridge forest candle stranger captain thief kitchen table list room door star book \
         road train mountain summer clock ghost fox owl heron lion wolf horse crown sea desert storm city village \
         king queen baker soldier dream night morning sister brother daughter mother friend enemy house tower \
         key ring coat hat drum violin silence fire stone cloud apple lemon salt bread wheel needle thread \
         story song film picture message ticket seat branch shelf note point hall",
        "lantern thimble beekeeper glacier comet pilgrim badger plum anvil sailor feather marsh chimney oar",
        "lighthouse weaver saddle meadow falcon hermit barrel pepper locket cinder raven well gardener pocket tide \
         cabin nettle miller compass swan parrot shepherd attic quarry"]),
    ("nouns", [
        "rivers lamps orchards windows sparrows gardens mirrors engines ladders letters shadows teachers islands \
         bridges candles strangers thieves doors stars books roads trains mountains summers clocks ghosts foxes \
         owls lions wolves horses storms kings queens soldiers dreams nights sisters brothers friends houses keys \
         rings coats drums stones clouds apples stories songs films pictures tickets seats points people",
        "lanterns comets pilgrims plums sailors feathers glaciers",
        "lighthouses weavers meadows falcons barrels ravens pockets tides swans shepherds nettles"]),
    ("adjective", [
        "red green blue golden silver white black quiet loud last first hidden broken lost long short old new \
         young sleepy hungry wild gentle cold warm dark bright empty second heavy secret little great open closed \
         late early good bad best blind lonely wooden happy sad",
        "crooked salty velvet patient hollow",
        "amber restless narrow gilded thirsty distant muddy faithful"]),
    ("past", [
        "followed found lost loved stole carried counted forgot painted watched opened closed broke built burned \
         hid heard wrote read sold called remembered waited slept danced laughed left kept moved played finished",
        "buried chased mended whispered",
        "borrowed planted shattered wandered rescued drowned tamed"]),
    ("verb", [
        "find lose love steal carry count forget paint watch open close break build burn hide hear write read \
         sell call remember keep move play finish read see",
        "bury chase mend",
        "borrow plant rescue tame wander"]),
    ("plain", [
        "tomorrow tonight find add book table list two seven who stars points called play open closed here now \
         please read later map way home nothing something everything message reserve rate next soon",
        "borrow later keep",
        "search hold renew mine both"]),
    ("firsta", [
        "mar el an jo ka li ro sa ti vi be da fe gi ha ma ne o pe ru",
        "tho bri cor",
        "wil ze sti lu ab"]),
    ("firstm", ["ra li na vi do mi lo re sa be ta ke", "zu ghe", "fi mu ska"]),
    ("firstb", [
        "la na ric lo nor mir ten len da ko vin ssa ne tta rin bert gar",
        "wyn zo",
        "fried dra lius"]),
    ("lasta", [
        "bar har stro ven mol ker dra lin pet ros tur wal zan gre fal ost hol bran ste kra",
        "fitz qua yor",
        "umb cla thor dob"]),
    ("lastb", [
        "sen ley kov mann dez berg ton ski well son ini ard ova ner wick oux",
        "quist hart",
        "ides strom eau more"]),
    ("towna", [
        "wel bar ash mor hart ken stan nor ock lang red whit sal tar glen dun bick thor col mal",
        "frim cud",
        "pen wy gos trel"]),
    ("townb", [
        "ford wick ham ton by field holm dale mouth burg stead bury",
        "thorpe minster",
        "combe haven worth"]),
    ("townc", ["cross end green landing point", "ferry", "reach gate"]),
];
