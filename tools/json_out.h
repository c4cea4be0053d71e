/* json_out: JSON for machines, on standard output. Commas are put where they belong; numbers have all their digits. */
#ifndef DDL_TOOLS_JSON_OUT_H
#define DDL_TOOLS_JSON_OUT_H

enum { JSON_TEXT_BYTES = 1 << 16 }; /* a longer text is cut */

static bool json_wants_comma;

/* "name": before a value of an object; NULL in an array. */
static void json_name(const char *name) {
    printf("%s", json_wants_comma ? ", " : "");
    if (name != NULL) {
        printf("\"%s\": ", name);
    }
    json_wants_comma = true;
}

/* bracket: { or [ */
static void json_open(const char *name, char bracket) {
    json_name(name);
    printf("%c", bracket);
    json_wants_comma = false;
}

static void json_close(char bracket) {
    printf("%c%s", bracket, bracket == '}' ? "\n" : "");
    json_wants_comma = true;
}

/* NULL: null. */
static void json_text(const char *name, const char *text) {
    static char room[JSON_TEXT_BYTES];
    json_name(name);
    if (text == NULL) {
        printf("null");
    } else {
        printf("\"%s\"", ddl__json_text(text, room, sizeof room));
    }
}

static void json_integer(const char *name, int64_t value) {
    json_name(name);
    printf("%lld", (long long)value);
}

/* Of a double, so that it is read back as it was. */
static void json_number(const char *name, double value) {
    json_name(name);
    printf("%.17g", value);
}

static void json_bool(const char *name, bool value) {
    json_name(name);
    printf("%s", value ? "true" : "false");
}

#endif /* DDL_TOOLS_JSON_OUT_H */
