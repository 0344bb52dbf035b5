//! The tables of heroes, animals and things, and the rules of the tales.

/// The tables that stories draw from: the names of the fields, the table whose row decides the
/// weights ("" if none does), and the rows.
///
/// A row begins with its weight, or with one weight for each row of the deciding table. The fields
/// follow; the first is what a first mention (`[name]` in a rule) writes.
#[rustfmt::skip]
pub(super) const SHEETS: &[(&str, &str, &[&str])] = &[
    ("hero / he / He / him / his / His", "", &[
        "3 Mara / she / She / her / her / Her", "3 Tobin / he / He / him / his / His",
        "3 Ilse / she / She / her / her / Her", "3 Jonas / he / He / him / his / His",
        "3 Nell / she / She / her / her / Her", "3 Anton / he / He / him / his / His",
        "2 Greta / she / She / her / her / Her", "2 Piet / he / He / him / his / His",
        "2 Agnes / she / She / her / her / Her", "2 Otto / he / He / him / his / His",
        "2 Robin / they / They / them / their / Their",
        "2 Sorrel / they / They / them / their / Their",
    ]),
    ("role / wares", "", &[
        "4 potter / pots", "3 tilemaker / tiles", "2 brickmaker / bricks", "2 pipemaker / pipes",
    ]),
    ("trait / moral", "", &[
        "3 patient / slow clay makes a sound jug",
        "3 stubborn / no fire asks who is tired",
        "2 curious / a closed lid teaches nobody",
        "2 proud / the tallest jug falls first",
        "2 merry / a song weighs nothing",
        "2 careful / one crack empties the jug",
        "2 gentle / soft hands shape hard clay",
        "2 lazy / a slow fire bakes every loaf",
    ]),
    ("sort", "", &[
        "3 small", "3 clever", "2 fat", "2 sleepy", "2 grumpy", "2 scruffy", "2 noisy",
    ]),
    ("animal / cried", "", &[
        "3 fox / barked", "3 goose / honked", "2 goat / bleated", "2 cat / mewed",
        "2 crow / cawed", "2 hen / clucked", "2 donkey / brayed", "2 hedgehog / snuffled",
    ]),
    ("pet", "", &[
        "3 Button", "3 Thimble", "3 Biscuit", "2 Pepper", "2 Crumb", "2 Pebble", "2 Nettle",
        "2 Mustard",
    ]),
    ("place / way", "", &[
        "3 river / down to the river", "3 hill / up the hill", "3 forest / into the forest",
        "2 marsh / across the marsh", "3 harbour / along the harbour",
        "2 mountain / up the mountain",
    ]),
    ("town", "", &["3 village", "3 town", "2 parish"]),
    // Weights by a river, hill, forest, marsh, harbour and mountain.
    ("spot", "place", &[
        "3 0 0 3 0 0 reeds", "3 0 0 0 2 0 bridge", "2 0 0 3 0 0 willow", "0 3 0 0 2 0 gate",
        "0 3 2 0 0 0 well", "0 2 0 2 0 3 stones", "0 0 3 0 0 0 oak", "0 0 3 0 0 3 pines",
        "0 0 0 0 3 0 nets", "2 0 0 0 3 0 boats", "0 0 0 0 0 2 cave",
    ]),
    ("thing / shone", "place", &[
        "2 3 0 0 3 3 bell / rang", "2 2 2 0 0 0 kettle / sang", "0 0 2 3 3 2 lantern / glowed",
        "2 3 0 2 0 2 whistle / trilled", "0 0 3 0 0 2 spoon / gleamed",
        "3 0 0 2 0 0 cup / steamed", "0 2 2 2 3 0 key / jingled",
    ]),
    ("helper / gift", "place", &[
        "2 2 2 0 2 0 baker / bread", "3 2 0 0 0 2 miller / flour", "0 0 3 2 0 2 beekeeper / honey",
        "0 2 2 2 2 0 gardener / plums", "2 0 0 3 3 0 fisherman / trout",
        "0 2 0 0 0 3 shepherd / cheese",
    ]),
    ("metal", "", &["3 copper", "3 silver", "2 brass", "2 tin", "2 golden", "2 painted"]),
    ("weather / sky / fell", "", &[
        "3 rainy / rain / tapped on the roof", "3 misty / mist / hid the chimneys",
        "2 windy / wind / shook the roof", "2 snowy / snow / covered the roof",
        "2 frosty / frost / covered the windows", "2 stormy / storm / shook the chimneys",
    ]),
    ("time", "", &["3 morning", "3 evening", "2 night", "2 afternoon"]),
];

/// The rules of the grammar, the story first; a rule may use (`@name`) only rules below it.
///
/// `{2 a | 1 b}` chooses between alternatives by their weights, `[name]` draws a row of a table,
/// `<field>` recalls a field of the row drawn, `^` takes away the space before the word that opens
/// a story, and `¶` is the line break that ends it. Anything else stands for itself.
#[rustfmt::skip]
pub(super) const RULES: &[(&str, &str)] = &[
    ("story", "@opening @friend {3 @loss | 3 @wish | 2 @windfall} @moral ¶"),
    ("opening", "
        {3 ^Once a [trait] [role] called [hero] {3 lived | 2 worked} in a @air [place] [town].
        |2 ^Long ago, a [trait] [role] named [hero] {2 built | 2 kept | 1 inherited} a @air kiln in a [place] [town].
        |2 ^There was once a [trait] [role] {2 named | 2 called} [hero] in a @air [place] [town].
        |2 ^People still {2 talk | 2 sing | 1 argue} about [hero], a [trait] [role] from a [place] [town].
        |2 ^In a @air [place] [town] lived [hero], as [trait] a [role] as any.}"),
    ("friend", "
        {3 <He> shared {2 a @air cottage | 2 <his> supper | 2 the work | 1 every secret} with
            a [sort] [animal] called [pet].
        |3 <His> {2 only | 2 best | 2 oldest | 2 loudest} friend was a [sort] [animal] called [pet].
        |3 A [sort] [animal] named [pet] {2 slept | 2 sulked | 1 lived} @nook,
            {2 guarding | 2 counting | 1 ignoring} the <wares>.
        |2 Nobody {2 bought | 2 praised | 1 wanted} the <wares>, but a [sort] [animal] named [pet]
            {2 guarded | 2 admired | 1 counted} them.}"),
    ("loss", "
        {2 <He> {2 owned | 2 treasured | 1 polished} |2 {3 Hidden | 2 Safe} @nook lay }
            a [metal] [thing], until one [weather] [time] it {2 vanished | 2 disappeared | 1 was gone}.
        {2 <hero> {2 searched | 2 emptied} every {2 cupboard | 2 drawer | 2 boot}.
        |2 The neighbours {2 shrugged | 2 blamed the <animal> | 1 offered advice}.
        |1 Even <pet> looked {1 worried | 1 guilty}.
        |2 }
        {2 At last | 2 Luckily, | 1 Then } @someone remembered
            {2 seeing | 1 hiding | 1 dropping} it beside the @air [spot].
        @quest @after"),
    ("wish", "
        {2 More than anything, <hero> wanted |2 For weeks <he> dreamed of
        |1 All winter <he> saved for } a [metal] [thing] to {2 keep | 1 hide} @nook.
        One [weather] [time], @someone {2 whispered | 2 swore | 2 heard | 1 dreamed} that
            one lay {2 waiting | 2 buried | 1 forgotten} beside the @air [spot].
        @quest
        {1 @after
        |1 It was {2 smaller | 2 heavier | 2 plainer | 2 louder} than {2 promised | 2 expected},
            but <hero> {2 loved | 2 kept | 1 polished} it {2 anyway | 1 forever}.}"),
    ("windfall", "
        {2 One [weather] [time] <pet> {2 found | 2 dug up | 1 tripped over}
        |2 Then, one [weather] [time], they {2 noticed | 2 discovered} }
            a [metal] [thing] beside the @air [spot].
        {2 It would have looked {2 splendid | 1 perfect} @nook.
        |2 <hero> {2 longed | 2 meant | 1 decided} to keep it, but <pet> <cried> {2 sternly | 1 loudly}.
        |1 Nobody was {2 watching | 1 looking}, which did not help.}
        {2 So <hero> |1 In the end <he>} carried it {2 <way> | 1 through the <sky>} to @someone, who
            {2 wept | 2 laughed | 2 danced | 1 fainted}.
        @after"),
    ("quest", "
        {2 So <hero> and <pet> {2 hurried | 2 walked | 1 crept} <way> and {2 found | 1 reached} it.
        |2 <pet> <cried> {2 once | 2 twice} beside the <spot>, and there {2 lay | 2 was} the <thing>.
        |2 Through the <sky> went <hero>, who {2 found | 2 dug up | 1 tripped over} the <thing>.
        |2 Without {2 a {2 coat | 2 word} | 1 breakfast}, <hero> {2 hurried | 2 walked} <way>
            and found the <thing>.}"),
    ("nook", "{2 beside | 2 behind | 2 under | 1 above} the {2 kiln | 2 stove | 1 table | 1 bed | 1 stairs}"),
    ("air", "{3 | 1 quiet | 1 muddy | 1 crooked}"),
    ("someone", "the {2 | 2 old | 1 young} [helper]"),
    ("after", "
        {3 After that the <thing> <shone> every <weather> <time>.
        |3 And whenever the <sky> <fell>, the <thing> <shone>.
        |3 That <time> the <helper> brought <him> <gift>, and <pet> {2 slept | 2 danced | 2 ate}
            {1 alone | 1 twice}.
        |2 For years <he> told the tale, while <pet> <cried> in the {2 best | 2 wrong | 1 sad} places.
        |6 }"),
    ("moral", "
        {2 In that <town> they {2 still | 2 often | 1 gladly} say that <moral>.
        |2 Anyone by the <place> will {2 tell | 2 warn | 1 remind} you that <moral>.
        |2 The <trait> <role> {2 only | 1 merely} {2 nodded | 2 smiled | 1 bowed} and said that <moral>.
        |2 Even the <sort> <animal> {2 knew | 2 agreed | 1 admitted} that <moral>.}"),
];
