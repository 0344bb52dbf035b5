//! What people say to a home assistant, and the values of the slots.

/// What is wanted, and the ways to say it, one a line.
///
/// `(a|b)` chooses, `[slot]` draws a value and tags it, `[slot:table]` draws it from another table and `@name` stands
/// for a fragment. A line that begins with `?` is for validation only, one with `!` for the test
/// only.
#[rustfmt::skip]
pub(super) const INTENTS: &[(&str, &str)] = &[
    ("light_on", "
        @please (turn|switch) on the [room] @light @end
        @please (turn|switch) the [room] @light on @end
        lights on in the [room] @end
        i need (some|more) light in the [room]
        it is (too|so) dark in the [room]
        i want (the|a) @light on in the [room]
        ? it is dark in the [room] turn on the @light
        ! i want the [room] @light on @end
        ! @please put the @light on in the [room]"),
    ("light_off", "
        @please (turn|switch) off the [room] @light @end
        @please (turn|switch) the [room] @light off @end
        lights out in the [room] @end
        i do not need the @light in the [room] (any more|now)
        i want (the|every) @light off in the [room]
        @please turn off (all the lights|every light|everything) in the [room]
        ? lights off in the [room] @end
        ! i want the [room] @light off @end
        ! i do not need the [room] @light turn it off"),
    ("light_brightness", "
        @please (set|bring) the [room] @light to [brightness:number] (|percent) @end
        @please dim the [room] @light to [brightness:number] (|percent) @end
        @please (dim|brighten) the lights in the [room] to [brightness:number] percent
        @please turn the [room] lights (up|down) to [brightness:number] (|percent)
        set the [room] to [brightness:number] percent brightness
        [brightness:number] percent brightness in the [room] @end
        ? i want the [room] at [brightness:number] percent brightness
        ! @please bring the [room] lights (up|down) to [brightness:number] percent
        ! set the brightness of the [room] @light to [brightness:number] (|percent)"),
    ("light_colour", "
        @please (make|turn) the [room] @light [colour]
        @please set the [room] @light to [colour] @end
        @please change the colour of the [room] @light to [colour]
        i want [colour] light in the [room]
        [colour] (light|lights) in the [room] @end
        i would like the [room] to be [colour]
        ? change the [room] to [colour] light
        ! @please change the [room] @light to [colour] @end
        ! i would like the [room] @light to be [colour]"),
    ("thermostat_set", "
        @please set the (thermostat|heating) to [temperature:degrees] (|degrees) @end
        @please set the [room] to [temperature:degrees] degrees
        @please (heat|cool) the [room] (|down) to [temperature:degrees] degrees
        make it [temperature:degrees] degrees in the [room]
        @please (turn|bring) the (thermostat|heating) (up|down) to [temperature:degrees] (|degrees|in the [room])
        i want it to be [temperature:degrees] degrees in the [room]
        it is too (cold|hot|warm) in the [room] set the thermostat to [temperature:degrees]
        ? i want the [room] at [temperature:degrees] degrees
        ! @please bring the [room] (up|down) to [temperature:degrees] degrees
        ! i would like the (thermostat|heating) to be at [temperature:degrees] (|degrees)"),
    ("temperature_query", "
        how @warm is it in the [room] (|right now|now)
        what is the temperature in the [room] (|right now|now)
        what is the thermostat in the [room] set to
        is it (|too) @warm in the [room] (|right now|now)
        how @warm is the [room] (|right now|now)
        ? tell me the temperature (in|of) the [room]
        ! how many degrees is it in the [room] (|right now|now)
        ! is the [room] (|too) @warm (|right now|now)"),
    ("timer_set", "
        @please set a timer for [duration] @end
        @please set a [duration:span] timer (|for the [timer])
        @please start a (timer|countdown) for the [timer] for [duration]
        [duration:span] timer @end
        timer for [duration] (|for the [timer])
        @please start a countdown of [duration] (|for the [timer])
        ? i need a timer for the [timer] for [duration]
        ! @please set a countdown (for|of) [duration] (|for the [timer])
        ! i need a [duration:span] timer (|for the [timer])"),
    ("timer_query", "
        how (long|much time) is left on the timer for the [timer]
        does the timer for the [timer] have (long|much time) left
        is the [timer] timer (done|over) (|now)
        is the timer for the [timer] (done|over)
        how long does the timer for the [timer] have
        @please check the [timer] timer
        when is the [timer] timer (done|over)
        ? how much time is left for the [timer]
        ! how (long|much time) does the timer for the [timer] have left
        ! how (long|much time) does the [timer] timer have left"),
    ("alarm_set", "
        @please set an alarm for [time] (|@day) @end
        @please wake me (|up) at [time] (|@day)
        @please wake me (|up) @day at [time]
        alarm (at|for) [time] (|@day) @end
        i (need|have) to (wake|be) up at [time] (|@day)
        i want (an|my) alarm at [time] (|@day)
        ? i need an alarm at [time] @day
        ! @day wake me (|up) at [time]
        ! i would like an alarm (at|for) [time] (|@day)"),
    ("alarm_cancel", "
        @please (cancel|delete) (my|the) [time] alarm (|@day) @end
        @please (cancel|delete|turn off) (my|the) alarm (for|at) [time] (|@day)
        i do not need (my|the|an) alarm (@day|at [time] (|@day))
        do not wake me (|up) @day
        no alarm (@day|at [time] (|@day)) @end
        @please remove (my|the) alarm for @day
        ? @please remove my alarm (for|at) [time] @day
        ! do not wake me (|up) at [time] (|@day)
        ! i do not need (my|the) [time] alarm (|@day)"),
    ("reminder_add", "
        @please remind me to [reminder] @when
        @please set a reminder to [reminder] @when
        @please set a reminder for [time] (|@day) to [reminder]
        @day remind me to [reminder] (|at [time])
        i (need|have) to remember to [reminder] @when
        do not let me forget to [reminder] @when
        @please remind me (at [time]|@day) to [reminder]
        ? at [time] remind me to [reminder]
        ! i (want|need) a reminder to [reminder] @when
        ! @please remind me @day at [time] to [reminder]"),
    ("list_add", "
        @please add [item] (|and [item]) to @my [list] list @end
        @please put [item] (|and [item]) on @my [list] list @end
        we are out of [item] add that to @my [list] list
        i (need|have) to buy [item] put that on @my [list] list
        [item] (|and [item]) should be on @my [list] list
        the [list] list needs [item]
        i (want|need) (more|some) [item] on @my [list] list
        ? we need [item] put that on @my [list] list
        ! we are out of [item] (|and [item]) put that on @my [list] list
        ! i need [item] on @my [list] list"),
    ("list_remove", "
        @please (remove|delete) [item] (|and [item]) from @my [list] list @end
        @please take [item] (|and [item]) off @my [list] list @end
        we have [item] (|and [item]) (already|now) take that off @my [list] list
        we have [item] (|and [item]) on @my [list] list (remove|delete) that
        i do not need [item] on @my [list] list (any more|now)
        [item] should not be on @my [list] list (|any more)
        ? we do not need [item] remove that from @my [list] list
        ! we have [item] (|and [item]) now (delete|remove) that from @my [list] list
        ! i do not need [item] (any more|now) take that off @my [list] list"),
    ("list_read", "
        what is on @my [list] list (|right now|now)
        @please read (|me) @my [list] list @end
        what do (i|we) have on @my [list] list
        how many things are on @my [list] list
        is there anything on @my [list] list
        ? tell me what is on @my [list] list
        ! what things are on @my [list] list (|right now|now)
        ! is there anything left on @my [list] list"),
    ("music_play", "
        @please play [song] by [artist] @end
        @please play the (song|track) [song] (|by [artist])
        @please play (something|some songs|some music|anything) by [artist] (|in the [room])
        @please put on (some|a little) [genre] (|music) (|in the [room])
        @please play (some|a little) [genre] (|music) (|in the [room])
        i (want|need) @my [playlist] playlist (|in the [room])
        @please (play|start) @my [playlist] playlist (|in the [room]|on the [player])
        i want to (hear|listen to) [song] by [artist]
        i want to (hear|listen to) (something|some music) by [artist]
        put @my [playlist] playlist on (|in the [room])
        i would like to (hear|listen to) (the (song|track) [song]|some [genre])
        ? @please put on [song] by [artist]
        ? play [genre] music on the [player]
        ! i would like to (hear|listen to) [song] by [artist]
        ! @please put on (something|some music) by [artist] (|in the [room])
        ! i want to (hear|listen to) @my [playlist] playlist (|in the [room])"),
    ("music_stop", "
        @please (stop|pause) the music (|in the [room]|on the [player])
        @please turn off the music in the [room]
        no more music (in the [room]|on the [player]) @end
        @please (stop|pause) the [player] @end
        @please stop (playing|the song) (in the [room]|on the [player])
        ? i do not want music in the [room] now
        ! no music (in the [room]|on the [player]) (right now|now)
        ! @please turn off the (music|song) on the [player]"),
    ("volume_set", "
        @please (set|change) the volume to [volume:number] (|percent) @end
        @please turn the volume (up|down) to [volume:number] (|percent) @end
        @please turn the [player] (up|down) to [volume:number] (|percent)
        volume (|at|to) [volume:number] (|percent|on the [player]) @end
        @please set the volume (of|on) the [player] to [volume:number] (|percent)
        @please set the [player] to volume [volume:number]
        ? i want the [player] at volume [volume:number]
        ! @please bring the volume (up|down) to [volume:number] (|percent|on the [player])
        ! @please change the volume (of|on) the [player] to [volume:number] (|percent)"),
    ("weather_query", "
        what is the weather (|like) in [city] (|@day)
        what is the weather going to be like @day (|in [city])
        will it [condition] (in [city] (|@day)|@day (|in [city]))
        is it going to (be [condition:sky]|[condition]) (in [city] (|@day)|@day)
        will it be [condition:sky] (in [city] (|@day)|@day)
        how @warm (is it|will it be|is it going to be) in [city] (|@day)
        (do|will) i need (an umbrella|a coat) in [city] (|@day)
        weather (for|in) [city] (|@day) @end
        @please give me the forecast for [city] (|@day)
        is [city] (warm|cold|hot|[condition:sky]) @day
        ? what is the forecast for [city] @day
        ! what will the weather be like in [city] (|@day)
        ! (do|will) i need (an umbrella|a coat) @day in [city]
        ! is [city] going to be [condition:sky] @day"),
    ("call_start", "
        @please call [contact] (|on @their [phone] phone) @end
        @please call [contact] at [phone:whereabouts]
        @please (dial|ring) [contact] (|on @their [phone] phone)
        @please make a call to [contact] (|on @their [phone] phone)
        i (need|want|have) to (talk|speak) to [contact]
        i (want|would like) to ring [contact] (|on @their [phone] phone|now)
        get [contact] on the phone @end
        @please get [contact] on @their [phone] phone
        ? i want to call [contact] (|on @their [phone] phone)
        ! i would like to (talk|speak) to [contact] (|on the phone)
        ! i (need|have) to (call|ring) [contact] (|at [phone:whereabouts])"),
    ("message_send", "
        @please (text|message) [contact] @saying
        @please send a (message|text) to [contact] @saying
        @please send [contact] a (message|text) @saying
        @please tell [contact] that [message:statement]
        @please let [contact] know that [message:statement]
        @please write to [contact] @saying
        i need to tell [contact] that [message:statement]
        ? @please write [contact] a message saying [message]
        ! @please write a (text|message) to [contact] saying [message]
        ! i (want|need) to (text|message) [contact] that [message:statement]"),
    ("event_add", "
        @please (add|put) (a|my|the) [event] (to|on) my calendar (for [day]|@day at [time]|@day)
        @please schedule (a|my|the) [event] (|with [contact]) (for [day]|@day at [time])
        i have a [event] (|with [contact]) @day at [time]
        @please make a calendar event for (a|my|the) [event] @day
        @please book a [event] (|with [contact]) (for [time] @day|@day at [time])
        @please put a [event] with [contact] on my calendar
        ? calendar event @day at [time] for my [event]
        ! @please schedule (a|my|the) [event] for [time] @day
        ! @please (add|put) (a|my) [event] with [contact] (to|on) my calendar @day"),
    ("event_query", "
        what is on my calendar (|@day)
        what do i have on my calendar @day
        do i have anything on my calendar @day (|at [time])
        do i have (a|my) [event] (|with [contact]) @day
        (when|what time) is (my|the) [event] (|with [contact])
        am i (free|busy) @day (|at [time])
        what day is (my|the) [event]
        ? is there anything on my calendar @day
        ! what day is my [event] with [contact]
        ! do i have a [event] on my calendar (|@day)"),
    ("door_lock", "
        @please lock the [door] @end
        @please make sure the [door] is locked @end
        @please keep the [door] locked (|@day)
        @please lock up the [door] (|for the night)
        the [door] should be locked (|@day)
        the [door] is (open|unlocked) lock it (|now)
        ? i want the [door] locked @end
        ! i have to lock the [door]
        ! the [door] is not locked lock it (|now) @end"),
    ("door_query", "
        is the [door] (locked|unlocked|open) (|right now|now)
        did i lock the [door] (|last night)
        @please check if the [door] is (locked|unlocked|open)
        @please check the [door] @end
        (when|what time) was the [door] (locked|unlocked)
        ? do you know if the [door] is locked
        ! @please tell me if the [door] is (locked|unlocked|open)
        ! was the [door] (locked|unlocked|open) last night"),
    ("door_unlock", "
        @please unlock the [door] @end
        @please open the [door] (|for [contact])
        @please let [contact] in through the [door]
        @please (keep|leave) the [door] unlocked (|for [contact])
        the [door] should be open (|for [contact])
        i want the [door] open @end
        ? i want the [door] unlocked @end
        ! @please unlock the [door] for [contact]
        ! leave the [door] open for [contact] @end"),
    ("vacuum_start", "
        @please vacuum the [room] (|@day|at [time]) @end
        @please send the (vacuum|robot) to the [room]
        @please tell the robot to (clean|vacuum) the [room] (|@day)
        start (the vacuum|the robot|cleaning) in the [room] (|@day|at [time])
        the [room] (floor is dirty|needs cleaning|is a mess)
        @please clean the (floor in the [room]|[room] floor|[room])
        ? the robot should clean the [room] @day
        ! i want the robot to (clean|vacuum) the [room] (|@day)
        ! the floor in the [room] (is dirty|is a mess|needs cleaning)"),
    ("question_ask", "
        who (is|was) [topic:person]
        tell me (|something|more) about [topic]
        what do you know about [topic]
        i have a question about [topic]
        how (old|big|far away) is [topic:place]
        @please look up [topic]
        where does [topic:stuff] come from
        i wonder where [topic:stuff] comes from
        (do you know|i want to know) where [topic:stuff] comes from
        (where|when) was [topic:person] born
        ? i want to know (|more) about [topic]
        ! how (old|big) was [topic:person]
        ! @please tell me where [topic:stuff] comes from
        ! do you know (something|anything) about [topic]"),
    ("channel_watch", "
        @please (put on|go to) channel [channel:number] @end
        @please put [channel] on the tv
        @please (switch|change|turn) the tv to [channel] @end
        @please (switch|change) to channel [channel:number]
        i want to watch [channel] (|on the tv)
        watch channel [channel:number] on the tv
        ? put the tv on [channel] @end
        ! @please (turn|switch) the tv to channel [channel:number]
        ! i would like to watch (channel [channel:number]|[channel]) (|on the tv)"),
    ("recipe_find", "
        how do (i|you) (make|cook) [dish]
        @please find (|me) a recipe for [dish] (|(with|without) [ingredient])
        what can i (make|cook) with [ingredient] (|and [ingredient])
        i want to (cook|make) [dish] (|(with|without) [ingredient])
        show me (a recipe|recipes) (for [dish]|with [ingredient])
        @please look for a recipe (for [dish] (|(with|without) [ingredient])|with [ingredient] (|and [ingredient]))
        what is a good recipe for [dish]
        ? i want to cook something with [ingredient]
        ! @please look up a recipe for [dish] (|(with|without) [ingredient])
        ! give me a recipe with [ingredient] (|and [ingredient])"),
    ("phrase_translate", "
        how do (you|i) say [phrase] in [language]
        @please translate [phrase] (to|into) [language]
        what is [phrase] in [language]
        what is the [language] (word|phrase) for [phrase]
        @please say [phrase] in [language]
        (i want|i need|i would like) to know how to say [phrase] in [language]
        do you know how to say [phrase] in [language]
        ? i need the [language] for [phrase]
        ! @please tell me how to say [phrase] in [language]
        ! i (want|need) to say [phrase] in [language]"),
];

/// What lines share, by name; a fragment may use those below it.
#[rustfmt::skip]
pub(super) const FRAGMENTS: &[(&str, &str)] = &[
    ("@please", "(||||please|can you|could you|would you please|hey can you)"),
    ("@end", "(||||please|thanks)"),
    ("@light", "(light|lights|lamp)"),
    ("@warm", "(warm|cold|hot)"),
    ("@my", "(my|the|our)"),
    ("@their", "(his|her|their)"),
    ("@saying", "(saying [message]|(saying|that) [message:statement])"),
    ("@when", "(||@day|at [time]|@day at [time]|at [time] @day)"),
    ("@day", "([day]|on [day:date])"),
];

/// The tables of values by name: those that may be drawn everywhere, and where there are any, those
/// for validation only and those for the test only.
#[rustfmt::skip]
pub(super) const VALUES: &[(&str, [&str; 3])] = &[
    ("room", ["kitchen, bedroom, living room, bathroom, hallway, office, garage, garden, dining room, guest room,
        attic, basement, nursery, playroom, laundry room, porch, kids room, studio", "", ""]),
    ("number", ["(five|eight|ten|twelve|fifteen|eighteen),
        (twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety) (|five),
        (twenty|thirty|forty|fifty|sixty|seventy|eighty) (|two|eight)", "", ""]),
    ("degrees", ["(fifteen|sixteen|seventeen|eighteen|nineteen), twenty (|one|two|three|five),
        (sixty|seventy) (|two|five|eight), fifty eight", "", ""]),
    ("colour", ["red, green, blue, purple, orange, pink, yellow, turquoise, lavender, gold, (warm|cool) white,
        (deep|light|soft) (blue|red|green), (soft|warm) (pink|yellow|orange)", "", ""]),
    ("duration", ["(two|five|eight|ten|twelve|fifteen|twenty|thirty|forty|forty five|fifty) minutes,
        (thirty|forty five|ninety) seconds, (an|one) hour, (two|three|five) hours, half an hour,
        (one hour|two hours) and (ten|fifteen|thirty) minutes", "", ""]),
    ("span", ["(two|five|eight|ten|twelve|fifteen|twenty|thirty|forty|forty five|fifty) minute,
        (thirty|forty five|ninety) second, (one|two|three|five) hour", "", ""]),
    ("timer", ["(chicken|turkey|ham|fish|salmon|carrots|beans|soup|sauce),
        (cake|brownies|bagels|waffles|cupcakes|tart|quiche),
        (meditation|workout|bath|shower|reading|break|meeting|game),
        (rice|fruit|cheese|chocolate) (pudding|cake|sauce|bread),
        (hair mask|face mask|sauna|plank|stretching|violin practice|spelling test), pasta, eggs, laundry, pizza,
        cookies, rice, bread, tea, oven, roast chicken, potatoes, lasagna, homework, nap, dough, washing machine",
        "muffins, dishwasher, noodles, bean soup",
        "pancakes, lentils, apple pie, sprinkler, steak, stew, piano practice, dryer"]),
    ("time", ["(five|six|seven|eight|nine|ten|eleven|twelve) (|fifteen|thirty|forty five),
        (five|six|seven|eight|nine|ten) (|thirty) in the (morning|evening),
        noon, midnight, half past (five|six|seven|eight|nine), quarter (to|past) (six|seven|eight|nine)", "", ""]),
    ("day", ["today, tonight, tomorrow, tomorrow (morning|evening|night), this (morning|afternoon|evening|weekend),
        (next|this) (monday|tuesday|wednesday|thursday|friday|saturday|sunday), next week", "", ""]),
    ("date", ["(monday|tuesday|wednesday|thursday|friday|saturday|sunday) (||morning|afternoon|evening),
        the (first|second|third|fifth|tenth|twelfth|twentieth) of (march|april|may|june|july|august|october),
        (christmas|new year's) (eve|day)", "", ""]),
    ("reminder", ["(call|text|visit|thank) (grandma|the vet|my boss|peter|anna|uncle joe|the bakery),
        (buy|order|find|return) (a ladder|cat food|new shoes|some glue|a cake|coffee|the drill),
        (wash|clean|polish|check) the (windows|floor|tires|fridge|stove|boots),
        (practice|study) (the guitar|spanish|chess|for the exam),
        (finish|start|write|send) (the report|my essay|the invoice|an email to dana),
        (drop off|collect|bring) (the parcel|my coat|the books|the medicine),
        (fill|empty|move) the (tank|bucket|bin|bins|car), (do|fold|sort) the (laundry|towels|taxes|dishes),
        take (the bins out|vitamins|a nap|the dog to the park), change the (oil|lock|password),
        call (mum|dad|georgia|austin|jackson|the dentist|the bank|the school),
        (buy|order) (milk|flowers|bread|stamps|paint), turn off the (oven|heating|lights|iron),
        lock the (back door|garage|shed), take (out the trash|the cake out|my pills|a break),
        pay the (rent|gas bill|phone bill), water the (plants|garden|roses), feed the (cat|dog|fish),
        send the (letter|photos) to (paris|grandma|sydney), play the piano,
        book (a table|the hotel|a flight to paris), clean the (kitchen|bathroom|car), set the alarm,
        (wash|iron) my (shirt|jeans), pick up the (kids|cake|laundry), watch the news, charge (my phone|the car),
        read to the kids, text (florence|the neighbours), make the (salad|bread)",
        "walk the (dog|puppy), renew my passport, mow the grass, (fix|paint) the (gate|fence),
        empty the dishwasher, cancel the gym",
        "(clean|sweep) the (chimney|gutters), return the library books, call the (plumber|insurance|landlord),
        (print|sign) the (tickets|contract), buy (batteries|candles|a present), change the (sheets|filter|bulb),
        send (ingrid|the lawyer) the keys, defrost the (freezer|turkey), vacuum the car, back up my laptop,
        order (a taxi|contact lenses), wrap the gifts"]),
    ("list", ["shopping, grocery, to do, packing, party, kitchen, garden, hardware, christmas, camping, birthday,
        pharmacy, office, weekend, holiday, school", "", ""]),
    ("item", ["(lemons|limes|grapes|pears|peaches|plums|cherries|melons|strawberries|raspberries),
        (carrots|potatoes|peppers|celery|lettuce|beans|peas|pumpkin|radishes|leeks),
        (beef|ham|bacon|salmon|tuna|shrimp|tofu|turkey|sausages),
        (flour|oats|cereal|sugar|yeast|vinegar|jam|noodles|lentils|walnuts|raisins),
        (tent|rope|torch|compass|map|backpack|umbrella|gloves|scarf|sandals),
        (glue|scissors|pencils|envelopes|folders|tape|markers|notebooks),
        (fresh|frozen|dried|canned|organic) (fruit|berries|fish|corn|herbs|peas|mango),
        (plastic|paper|wooden) (cups|plates|spoons|forks|bags|straws),
        (hand|baby|laundry|face) (soap|powder|wipes|lotion|towels), (cat|bird|fish) (food|toys|treats),
        (apple|grape|tomato|lemon) (juice|jam|tea),
        (shovel|bucket|ladder|drill|wrench|hinges|bricks|gravel|fertilizer), milk, eggs, bread, butter, cheese,
        apples, oranges, bananas, coffee, green tea, rice, pasta, olive oil, tomatoes, onions, garlic, chicken,
        soap, toothpaste, paper towels, toilet paper, light bulbs, batteries for the radio, sun cream, socks,
        raincoat, passport, red wine, orange juice, chocolate, cookies, flowers, balloons, candles for the cake,
        dog food, cat litter, (green|blue|red) paint, nails, hammer, stamps, printer paper, lavender,
        tomato seeds, lamp, new curtains, phone charger, shampoo, dish soap, frozen pizza, peanut butter,
        vanilla ice cream, salt, black pepper, ginger",
        "yogurt, mustard, almond milk, sponges, flashlight, tulips, spinach, duct tape, wool hat, corn flakes",
        "honey, avocados, oat milk, cinnamon, trash bags, sparkling water, sleeping bag, screws, sandpaper,
        mushrooms, cucumbers, maple syrup, hand cream, swimming goggles, birthday card, mosquito spray,
        hiking boots, blueberries, soy sauce, cardboard boxes, pink ribbon, bay leaves, brown sugar, garden hose,
        vitamins, parsley"]),
    ("song", ["
        (broken|silent|distant|burning|frozen|golden|crooked|secret) (heart|road|river|bells|mirror|island|shoes|crown),
        (dance|walk|fly|wait|sing|run) (with me|alone|for you|away|tonight|in the rain),
        (thunder|gravity|horizon|wildfire|mirage|satellite|avalanche|daydream),
        (queen|king|ghost|child|shadow) of the (valley|harbour|desert|city|snow),
        (never|always|almost|maybe) (home|yours|enough|again|sorry),
        (hotel|motel|cafe|club) (moonlight|august|jupiter|serenade),
        (emerald|scarlet|amber|crystal) (eyes|skies|tears|wings),
        (ballad|song|dream) of (clara|the sailor|the fox|winter), silver river, midnight train, paper moon,
        dancing in the kitchen, summer rain, hello tomorrow, lights of paris, blue monday morning,
        my little garden, georgia nights, seven days, call me home, the last door, slow down, golden hour,
        under the porch, one more minute, cold coffee, winter in sydney, forty roses, the long road, open window,
        sunday, dear austin, turn it around, half a heart, purple sky, wake me gently, red balloon,
        lavender fields, stay tonight, echoes",
        "broken compass, violet storm, ten thousand steps, oh marianne, harbour bells, the quiet room",
        "glass mountain, feather and stone, driftwood, ghosts of june, tangerine, swallow the sun, sleepless city,
        lanterns, waltz for the whale, north of nowhere, candlelight, velvet shadow, running barefoot,
        the clockmaker, hurricane lane, thirteen sparrows, honeycomb"]),
    ("artist", ["the (lonely|golden|electric|broken|wild) (tigers|poets|sailors|rockets|dancers|shoes),
        (arlo|bonnie|cassie|duke|ezra|freya) (storm|rivers|west|winters|page),
        (neon|static|lunar|plastic|marble) (hearts|parade|ocean|tigers|season),
        (ivy|jonah|kira|luther|minnie|otis) (moss|steele|fox|holland|baker), dj (rocket|tango|velvet|mango|zero),
        (mirrorball|halcyon|driftless|starling|magpie|monsoon),
        the (mountain|river|city) (sisters|brothers|orchestra), georgia lane, the velvet lanterns, paris holloway,
        austin reed, jackson grey, nina marlowe, the paper foxes, florence bell, blue harbour,
        the night gardeners, marcus dale, silver pines, sydney hart, lola and the waves, red clay choir,
        the sunday kitchen, oscar finn, dj marble, the brass monkeys, clara stone, tin roof, georgia,
        the cold spoons, mister july, nora vale, the moon band, echo park road, king otter",
        "elsa north, the wooden horses, dj pepper, calum frost, amber tide",
        "the crooked spires, imogen blackwood, quartz, petra sollis, the tired pilots, dj kettle, wilder creek,
        hugo vance, the marmalade kings, zadie bloom, copper wren, the lost umbrellas, rufus kane, delphine,
        stray comets"]),
    ("genre", ["jazz, rock, classical, pop, blues, country, soul, reggae, folk, hip hop, piano, techno, swing,
        opera, metal, (soft|slow|eighties|nineties) (rock|pop|jazz)", "", ""]),
    ("playlist", ["(monday|friday|saturday|weekend) (mood|energy|morning|chill),
        (summer|winter|autumn|spring) (vibes|nights|hits|feelings),
        (rock|soul|guitar|party|love) (classics|favourites|mix|ballads),
        (driving|walking|dancing|painting|gaming|wedding|thinking),
        (old school|new music|best of the year|after work|before bed|guilty pleasures|top fifty), morning coffee,
        dinner party, workout, road trip, sunday jazz, cooking, rainy day, summer, christmas, focus,
        kitchen disco, sleep, running, garden party, throwback, birthday, study, cleaning, family, late night,
        happy songs, beach",
        "morning run, campfire, first dance, office hours",
        "deep focus, yoga flow, sunset drive, lullabies, gym power, baking day, indie gems, bath time, karaoke,
        long flight, feel good friday, spring cleaning"]),
    ("player", ["speaker, speakers, radio, stereo, tv,
        (kitchen|bedroom|living room|garage|office) (speaker|radio|tv)", "", ""]),
    ("condition", ["rain, snow, freeze, hail, storm, clear up, rain again, snow again", "", ""]),
    ("sky", ["sunny, windy, cloudy, foggy, stormy, icy, humid, dry, very (hot|cold|windy|sunny),
        below freezing", "", ""]),
    ("city", ["(athens georgia|paris texas|birmingham|manchester|liverpool|leeds|cardiff|belfast),
        (milan|naples|turin|venice|palermo|bologna), (lyon|nice|lille|toulouse|bordeaux),
        (dallas|houston|miami|atlanta|detroit|memphis|nashville|cleveland),
        (san francisco|los angeles|las vegas|kansas city|santa cruz|palm springs),
        (mumbai|delhi|bangkok|jakarta|manila|hanoi), (osaka|kyoto|taipei|shanghai|beijing|hong kong),
        (bogota|quito|caracas|rio|sao paulo|mexico city), (helsinki|stockholm|copenhagen|bergen|reykjavik),
        (melbourne|perth|brisbane|auckland|wellington), paris, austin, sydney, georgia, florence, jackson, london,
        new york, berlin, madrid, rome, boston, chicago, tokyo, dublin, vienna, new orleans, san diego, orlando,
        lisbon, oslo, cairo, hamburg, salt lake city, phoenix, victoria, charlotte, kingston, savannah, helena,
        lima, seoul, santiago, toronto",
        "athens, denver, new delhi, porto, glasgow, san jose, augusta",
        "prague, seattle, buenos aires, warsaw, santa fe, munich, edinburgh, nairobi, cape town, baton rouge,
        geneva, krakow, st petersburg, adelaide, marseille, la paz, tulsa, zagreb, fort worth, bristol"]),
    ("contact", ["(alice|arthur|bella|bruno|caleb|cora|dana|dennis|edith|elias),
        (fiona|frank|gavin|gloria|harold|hazel|isaac|iris|jamal|jenny),
        (karim|laura|liam|lydia|marta|miles|nadia|noah|olga|owen),
        (paula|pedro|quentin|rachel|ralph|ruth|simon|stella|theo|tina),
        (ursula|victor|wendy|xavier|yara|yusuf|amir|chloe|diego|greta),
        (uncle|aunt|cousin) (frank|edith|noah|stella|dana|victor|ruth|karim),
        (doctor|mister) (lopez|schmidt|brown|novak|singh|rossi|weber|hayes),
        the (electrician|baker|florist|gardener|bank|hotel|mechanic|hairdresser),
        my (uncle|cousin|teacher|coach|daughter|son|wife|husband|neighbour),
        (alice|bruno|laura|miles|theo|gloria) (brown|lopez|hayes|novak|stone), mum, dad, grandma, austin, paris,
        georgia, jackson, sydney, florence, victoria, charlotte, helena, savannah, madison, anna, peter, maria,
        uncle joe, aunt rose, doctor miller, my sister, my brother, my boss, the dentist, tom, lucy, daniel,
        sarah jones, ben, omar, emma, santiago, mister king, the neighbours, carlos, nina, kate",
        "grandpa, augusta, oliver, doctor patel, aunt vera, hannah, the vet, leo",
        "imogen, ravi, brooklyn, denver, the plumber, my landlord, uncle hamish, doctor okafor, priya, fergus,
        beatrix, mister olsen, tamsin, joaquin, aunt mabel, the babysitter, walter finch, zoe, ingrid,
        the pharmacy"]),
    ("phone", ["work, home, mobile, office, cell", "", ""]),
    ("whereabouts", ["work, home, school, the office, the hotel", "", ""]),
    ("message", ["(what|when|where) (is for dinner|is the meeting|are you|do we meet|did you go),
        (bring|buy|send me|take) (the charger|some wine|the photos|an umbrella|your guitar),
        (can you|will you) (feed the cat|close the windows|book a table|wait for me|open the door),
        (sorry|sleep well|get well soon|good job|have fun|take care|merry christmas|no problem), happy birthday,
        happy new year, (please|you should) (buy milk|call me|turn off the heating|lock the back door),
        thank you for (dinner|the flowers|the call), set an alarm for seven, play the song again,
        call me (tomorrow|tonight|at noon), good night, remind me to pay the rent, add bread to the list,
        what is the weather like in (paris|georgia), are you at home, how was (school|work|the party),
        do you need (anything|a ride|the car) (today|tomorrow), see you (soon|on friday|next week)",
        "good luck with the test, see you at the gate, did you feed the dog",
        "congratulations on the new job, let us meet (at|near) the (museum|harbour), do not forget the cake,
        turn the volume down, can you (pick up|bring) the (parcel|kids|drinks), safe travels, where did you park,
        water the plants (today|on sunday)"]),
    ("statement", ["(i|we) (bought|found|lost|sold|finished) the (tickets|lamp|old piano|report|bread),
        (the|my) (car|phone|oven|printer|boat) (is broken|does not start|works again|was expensive),
        (mum|anna|the teacher|uncle joe) (called|is here|left early|wants to talk),
        (it|the party) (was|will be) (fun|great|raining|too loud),
        (i|we) (can|can not|will) (join|help|leave at six|wait|meet on sunday),
        the (bus|train|taxi) (was early|leaves soon|is full),
        (i am|we are) (running late|on the way|almost there|stuck in traffic|at the station|in the garden|
        home now|at the dentist),
        dinner is (ready|at seven|in the oven|in the kitchen),
        the (lights are off|door is locked|music was great|alarm went off),
        i will (call you|be there|see you|bring the salad) (tomorrow|tonight|at noon|later|on friday),
        nobody is home, the weather in (paris|sydney|georgia) is lovely, i (love|miss) you,
        the (meeting|party|game) (is over|starts at eight|was fun),
        i need (a ride|more time|the car) (today|tomorrow), we are out of (milk|coffee|bread),
        the kids are (asleep|at school|with austin), i can not come (tonight|on monday), the timer is done,
        (georgia|florence) says hello, it is cold in here, the recipe needs more salt",
        "i (left|lost) my (keys|wallet) in the (car|office), my flight (lands|leaves) at six, the dog is sick,
        we got the tickets",
        "the (meeting|concert) was moved to (thursday|next week), my (train|bus) is late again,
        i found your (blue jacket|glasses|notebook), (someone|the plumber) will water the plants,
        the (package|sofa) has arrived, the baby is (finally|already) sleeping, i already paid the (bill|rent),
        we should paint the bedroom this weekend, the power is out, grandma feels better, i am proud of you,
        lunch is on me"]),
    ("event", ["(guitar|singing|cooking|french|spanish|drawing) (lesson|class|course),
        (staff|project|client|school|family) (meeting|lunch|dinner|call|trip),
        (doctor|hospital|bank|salon) (visit|appointment), (soccer|hockey|baseball|golf) (practice|game|training),
        (graduation|funeral|festival|interview|checkup|rehearsal|workshop|brunch|massage|manicure),
        (history|physics|spelling|language) (exam|test|quiz), (train|bus|boat) to (london|rome|madrid),
        dentist appointment, doctor's appointment, team meeting, yoga class, piano lesson, lunch, dinner,
        birthday party, date, job interview, parents evening, football game, haircut, movie night, phone call,
        flight to paris, garden party, math test, book club, conference, barbecue, school play, meeting, concert,
        tennis match, dance class",
        "budget review, wedding, swimming lesson, car service, game night",
        "physio session, board meeting, pottery workshop, choir rehearsal, picnic, wine tasting, vet visit,
        baby shower, driving lesson, house viewing, marathon, sales pitch, blood test, farewell dinner,
        chess tournament"]),
    ("door", ["front door, back door, garage, garage door, side door, side gate, garden gate, shed, basement door,
        balcony door, kitchen door, office, main door, porch door, patio door, gate, cellar, bedroom window", "", ""]),
    ("topic", ["(elephants|tigers|dolphins|sharks|owls|ants|spiders|snakes|horses|wolves),
        (robots|rockets|computers|batteries|magnets|lasers|satellites),
        (tornadoes|deserts|rivers|clouds|icebergs|tides|caves), (venus|neptune|pluto|uranus),
        the (vikings|romans|renaissance|stone age|moon landing|human brain|liver),
        (ballet|poetry|sculpture|cinema|chess|baseball|sushi|cotton|steel|diamonds|marble),
        (ancient|modern) (greece|egypt|china|art|music), the (black|red|yellow|dead) sea,
        (solar|wind|nuclear) (power|energy), black holes, volcanoes, paris, georgia, the moon, jazz, chocolate,
        ancient rome, dinosaurs, coffee, the eiffel tower, florence, photosynthesis, blue whales, rainbows, bread,
        tea, electric cars, mars, the great wall, opera, penguins, the ocean, pizza, honey bees, lightning,
        saturn, orange trees, the north pole, the alarm clock, christmas, the piano, polar bears",
        "the sahara, octopuses, gravity, silk, the violin, comets, mushrooms",
        "the milky way, sea turtles, pyramids, jupiter, rubber, earthquakes, the amazon river, saffron, vaccines,
        bamboo, the loch ness monster, tango, glaciers, porcelain, the bicycle, gorillas, amber, cathedrals,
        kangaroos"]),
    ("place", ["the moon, the eiffel tower, paris, georgia, mars, the great wall, saturn, the north pole,
        florence, sydney, the ocean, london, the sun", "the sahara, mercury",
        "the milky way, jupiter, the amazon river, mount fuji, lake victoria, madagascar"]),
    ("stuff", ["coffee, chocolate, pizza, tea, jazz, bread, opera, honey, garlic, lavender, football, lightning",
        "silk, gravity", "rubber, saffron, porcelain, bamboo, tango, sugar, amber"]),
    ("person", ["marie curie, mozart, albert einstein, cleopatra, leonardo da vinci, isaac newton,
        george washington, frida kahlo, jane austen, andrew jackson, florence nightingale, galileo, napoleon,
        queen victoria, beethoven, rosa parks, marco polo",
        "charles darwin, vivaldi, ada lovelace, van gogh",
        "johannes kepler, amelia earhart, aristotle, emily dickinson, confucius, harriet tubman, franz schubert,
        nikola tesla, hypatia, abraham lincoln"]),
    ("channel", ["(animal|car|travel|war|family|garden) (planet|tv|world|stories|channel),
        the (music|movie|travel|history|shopping|science) channel,
        (island|mountain|hospital|police) (rescue|life|diaries|heroes),
        the (dance|talent|cooking) (show|contest|final), (golf|tennis|racing|boxing) (live|today|weekly),
        (sitcom|mystery|romance|thriller) (central|express|plus), the news, the sports channel, nature plus,
        movie time, channel one, the weather channel, kids world, city news, the cooking channel, history now,
        music tv, comedy gold, the home channel, science live, football live, the garden show, planet four,
        classic films, the morning show, jazz tv",
        "travel hour, the quiz show, crime night, ocean tv",
        "drama central, the baking contest, space today, western gold, the late show, cartoon castle,
        business daily, horror house, the auction channel, anime street, farm life, opera live"]),
    ("dish", ["(beef|turkey|shrimp|tofu|duck) (curry|stew|tacos|noodles|burgers),
        (cheese|mushroom|spinach|ham) (omelette|pie|pasta|toast),
        (walnut|pear|cherry|honey|coffee) (cake|tart|muffins|ice cream),
        (pea|leek|bean|corn|carrot) (soup|salad|stew),
        (hummus|falafel|chili|lasagne|moussaka|gazpacho|ramen|sushi|burritos|brownies),
        (baked|grilled|mashed) (potatoes|fish|beans|apples), lasagna, pancakes, chicken soup, apple pie,
        tomato soup, pizza, fried rice, bread, beef stew, mushroom risotto, banana bread, potato salad,
        chocolate cake, fish tacos, green curry, onion soup, garlic bread, roast chicken, omelettes, lemon cake,
        vegetable soup, meatballs, rice pudding, carrot cake, pasta salad, christmas cookies",
        "pumpkin soup, dumplings, waffles, lamb curry, cheese fondue",
        "shepherd's pie, gnocchi, miso soup, cinnamon rolls, paella, stuffed peppers, goulash, lentil curry,
        french toast, blueberry muffins, ratatouille, spinach quiche, peach cobbler, pad thai, crab cakes"]),
    ("ingredient", ["(pork|turkey|ham|tuna|lamb|duck|sausage),
        (peas|corn|leeks|celery|pumpkin|beets|cabbage|lettuce|radishes),
        (oats|flour|quinoa|barley|noodles|couscous), (cherries|plums|peaches|figs|dates|raisins),
        (smoked|fresh|canned) (fish|tomatoes|cheese|herbs), (red|white|black) (beans|wine|rice|onions),
        (mint|thyme|cumin|paprika|mustard|vinegar), chicken, rice, eggs, tomatoes, onions, butter, garlic,
        mushrooms, milk, cheese, potatoes, pasta, beef, lemon, bananas, chocolate, olive oil, carrots, fish,
        peanut butter, green beans, ginger, cream, black pepper, apples, bread",
        "tofu, spinach, coconut milk, bacon, honey",
        "chickpeas, salmon, zucchini, sour cream, almonds, sweet potatoes, basil, cauliflower, soy sauce, pears,
        shrimp, kale, goat cheese, lentils"]),
    ("phrase", ["(welcome|goodbye|sorry|hello|congratulations|delicious|beautiful|tomorrow),
        (i need|i would like|do you have) (a taxi|a towel|some bread|a map|a ticket|the menu|a blanket),
        (where is|how far is) (the hotel|the beach|the airport|the museum|my seat),
        (spoon|window|rabbit|bicycle|teacher|apple|sister|forest),
        (the|my) (soup|room|coffee|bag) is (cold|hot|dirty|missing), good morning, thank you,
        where is the station, i am hungry, good night, how much is it, the bill please, happy birthday,
        i love you, see you tomorrow, cheese, the door is open, excuse me, one coffee please,
        where is the bathroom, water, i am lost, turn left, my name is georgia, the weather is nice,
        can you help me, two tickets to paris, a glass of red wine, kitchen, what time is it, i do not understand,
        call a doctor, no sugar please, butterfly, next week",
        "nice to meet you, i am allergic to nuts, well done, umbrella, how old are you",
        "good luck, safe travels, the train is late, i need a pharmacy, cheers, bless you, a table for two,
        sunflower, is this seat taken, where can i park, strawberry jam, i would like to pay, mountain,
        best wishes, the soup is too salty, please drive slowly"]),
    ("language", ["french, spanish, german, italian, japanese, portuguese, greek, dutch, polish, turkish, korean,
        arabic, swedish, hindi, chinese", "", ""]),
];
